"""Where the ranks of a new process group meet.

A launcher's store may be older than the group: torchrun uses one for all attempts of a job, and so does a
program that destroys a group and makes another (torch 2.13). New ranks would read what earlier ones wrote
there, such as gloo's addresses, and connect to processes that have ended. Every group therefore uses a prefix
that rank 0 draws. To learn the current one, each other rank writes a token and waits for the answer to it;
rank 0 answers every token until all ranks have reported.
"""

import json
import os
import time
import uuid
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, PrefixStore, Store, rendezvous  # type: ignore[attr-defined]  # public, but not in its __all__

from composer_dist.config.launched import launched_number
from composer_dist.distributed.ranks.liveness import identify
from composer_dist.distributed.ranks.loopback import on_one_host, own_store, remember_host
from composer_dist.errors import ParallelismRuntimeError
from composer_dist.wording import ranks_named


def meeting_place(timeout: timedelta | None = None) -> dict[str, Any]:
    """The arguments of `init_process_group` for the store and ranks of the launcher's job."""
    limit: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    rank, world_size = launched_number("RANK"), launched_number("WORLD_SIZE")
    if rank >= world_size:
        raise ParallelismRuntimeError(
            f"RANK is {rank}, but WORLD_SIZE is {world_size}: ranks have the numbers from 0 to "
            f"{world_size - 1}."
        )
    if on_one_host(os.environ) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        shared = own_store(launched_number("MASTER_PORT"), rank, **limit)
        if rank == 0:
            shared.set("host", json.dumps(identify()))
    else:
        try:
            shared, rank, world_size = next(rendezvous("env://", **limit))
        except DistError as error:
            address, number = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
            done = "opened by rank 0" if rank == 0 else f"reached by rank {rank}"
            raise ParallelismRuntimeError(
                f"The store of the ranks, port {number} of {address}, cannot be {done}: "
                f"{str(error).partition(chr(10))[0]} Check that MASTER_ADDR is the host of rank 0, that rank "
                "0 runs, and that no other program uses the port, or set MASTER_PORT to a free one on all "
                "ranks."
            ) from error
    name = agreed_name(shared, rank, world_size)
    if rank and shared.check(["host"]):
        remember_host(json.loads(shared.get("host")))
    store = PrefixStore(name, shared)
    return {"store": store, "rank": rank, "world_size": world_size}


def agreed_name(store: Store, rank: int, world_size: int) -> str:
    """A name that rank 0 draws, the same on all ranks; all must call it."""
    return _give_name(store, world_size) if rank == 0 else _ask_name(store, rank)


def _give_name(store: Store, world_size: int) -> str:
    name = uuid.uuid4().hex
    absent = list(range(1, world_size))
    patience = _seconds(store)
    deadline = time.monotonic() + patience
    while True:
        for rank in absent:
            if store.check([f"token/{rank}"]):
                store.set(f"answer/{store.get(f'token/{rank}').decode()}", name)
        absent = [rank for rank in absent if not store.check([f"{name}/here/{rank}"])]
        if not absent:
            return name
        if time.monotonic() > deadline:
            raise ParallelismRuntimeError(
                f"Of {world_size} ranks, {ranks_named(absent)} did not arrive within {patience:g} s. Check "
                "their logs, and that their machines can reach MASTER_ADDR."
            )
        time.sleep(0.002)


def _ask_name(store: Store, rank: int) -> str:
    token = uuid.uuid4().hex
    store.set(f"token/{rank}", token)
    try:
        name = store.get(f"answer/{token}").decode()
    except DistError as error:
        raise ParallelismRuntimeError(
            f"Rank 0 did not answer rank {rank} within {_seconds(store):g} s. "
            "Check its log, and that all ranks were started."
        ) from error
    store.set(f"{name}/here/{rank}", "")
    return name


def _seconds(store: Store) -> float:
    return float(store.timeout.total_seconds())  # type: ignore[attr-defined]  # torch's stub lacks it
