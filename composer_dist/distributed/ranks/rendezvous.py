"""Where the ranks of a new process group meet.

A launcher's store may be older than the group. torchrun keeps one for all attempts of a job, and so does a
program that ends a group and makes another (torch 2.13). What the earlier ranks wrote there, such as gloo's
addresses, would be read as if it were the new ones', which would dial processes that are gone. So every
group has a part of the store for itself, under a name that rank 0 draws.

How the others learn the name without believing an old one: each leaves a token of its own and waits for the
answer to just this token. Rank 0 answers every token it finds until all ranks have said that they are there.


MERGED: The network interface by which gloo reaches other hosts.

Gloo gives its peers the address to which the machine's own name resolves. On many machines that is
127.0.0.1 or 127.0.1.1, under which every other host finds itself, and the ranks wait for each other.
NCCL looks at the interfaces instead, and needs no help.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import (  # type: ignore[attr-defined]  # public, but not in its __all__
    DistError,
    PrefixStore,
    Store,
    rendezvous,
)

from composer_dist.errors import ParallelismRuntimeError
from composer_dist.wording import ranks_named


def meeting_place(timeout: timedelta | None = None) -> dict[str, Any]:
    """The arguments of `init_process_group` that say where the ranks of the launcher's job meet.

    Raises:
        ParallelismRuntimeError: a rank did not come in time; rank 0 names those that did not.
    """
    limit: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    shared, rank, world_size = next(rendezvous("env://", **limit))
    store = PrefixStore(agreed_name(shared, rank, world_size), shared)
    return {"store": store, "rank": rank, "world_size": world_size}


def agreed_name(store: Store, rank: int, world_size: int) -> str:
    """A name that rank 0 draws and all ranks that are alive return; they all have to call."""
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
                f"Of {world_size} ranks, {ranks_named(absent)} did not come within {patience:g} s. Look at "
                "their logs, and whether their machines reach MASTER_ADDR."
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
            "Look at its log, and whether all ranks were started."
        ) from error
    store.set(f"{name}/here/{rank}", "")
    return name


def _seconds(store: Store) -> float:
    """How long it waits for a key."""
    return float(store.timeout.total_seconds())  # type: ignore[attr-defined]  # torch's stub lacks it


_ELSEWHERE = "192.0.2.1"
"""An address that is nobody's (RFC 5737); what is sent there would take the default route."""


_SIOCGIFADDR = 0x8915  # netdevice(7)


def gloo_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """`GLOO_SOCKET_IFNAME` where it is needed: several hosts, and a name that leads back to this one.

    Args:
        environ: with torchrun's variables.
    """
    world = int(environ.get("WORLD_SIZE") or 1)
    one_host = int(environ.get("LOCAL_WORLD_SIZE") or 1) >= world
    if "GLOO_SOCKET_IFNAME" in environ or one_host or not _leads_back(socket.gethostname()):
        return {}
    for host in (environ.get("MASTER_ADDR", ""), _ELSEWHERE):
        if (address := _address_towards(host)) is not None and (name := _interface_of(address)) is not None:
            return {"GLOO_SOCKET_IFNAME": name}
    return {}


def _leads_back(host: str) -> bool:
    """Whether a name means the machine on which it is looked up, or nothing."""
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET)
    except OSError:
        return True
    return ipaddress.ip_address(found[0][4][0]).is_loopback


def _address_towards(host: str) -> str | None:
    """This machine's own address on the way to `host`; None without a way out."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing: the kernel chooses a route
        address: str = probe.getsockname()[0]
        return None if ipaddress.ip_address(address).is_loopback else address
    return None


def _interface_of(address: str) -> str | None:
    if sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # one without an address
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None
