"""The worker's side of `tests/kit/world.py`: runs one job after the other, each from a clean slate."""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy
import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from composer_dist._torch import clear_dtensor_caches
from composer_dist.distributed.mesh.mesh import forget_meshes

Setup = Literal["group", "environment", "nothing"]

HOST = "127.0.0.1"
ROOT = Path(__file__).parents[2]


@dataclass
class Job:
    """What one rank needs to know for one run."""

    number: int
    rank: int
    world_size: int
    timeout: float
    setup: Setup
    gloo_threads: int
    launcher_port: int
    path: list[str]
    filters: list[tuple[str, str, type[Warning], str, int]]
    call: bytes


def serve(connection: Connection, port: int, log: str) -> None:
    """Answers jobs until the parent closes its end."""
    _settle(log)
    _show_values_of_assertions()
    gc.freeze()
    # One connection for all runs: each costs a look-up of the host's name, which may take seconds.
    store = dist.TCPStore(HOST, port, is_master=False)
    connection.send_bytes(b"ready")
    while True:
        try:
            job: Job = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        answer, succeeded = _answer(job, dist.PrefixStore(f"run-{job.number}", store))
        if not succeeded:
            _tear_down()  # first: the peers' collectives then fail at once instead of waiting
        connection.send_bytes(answer)
        connection.recv_bytes()  # every rank is done: nobody needs this rank's sockets any more
        _tear_down()


def _settle(log: str) -> None:
    """Gives the worker its own process group, output file, and an end when the parent ends."""
    os.setpgid(0, 0)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.enable(2)
    # Chained to the default action: SIGUSR1 writes the stacks, then ends the process.
    faulthandler.register(signal.SIGUSR1, 2, all_threads=True, chain=True)
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _show_values_of_assertions() -> None:
    """Has test modules rewritten when they are imported, as pytest does in its own process."""
    from _pytest.assertion import util
    from _pytest.config import get_config

    with mock.patch.dict(os.environ, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1"):
        config = get_config()
        config.parse(["-c", os.devnull, "--rootdir", str(ROOT), "--noconftest", "--capture=no"])
    pytest.register_assert_rewrite("tests.kit")

    def compare(op: str, left: Any, right: Any) -> str | None:
        found = config.hook.pytest_assertrepr_compare(config=config, op=op, left=left, right=right)
        lines = next(filter(None, map(list, filter(None, found))), None)
        return lines and "\n~".join(line.replace("\n", "\\n") for line in lines).replace("%", "%%")

    util._reprcompare = compare


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)


def _answer(job: Job, store: dist.Store) -> tuple[bytes, bool]:
    """Runs the job; the answer is the pickle of (succeeded, result or traceback, when it ended)."""
    try:
        with _clean_slate(job), one_gloo_thread() if job.gloo_threads == 1 else contextlib.nullcontext():
            fn, args, kwargs = pickle.loads(job.call)
            if job.setup == "group":
                place = {"store": store, "rank": job.rank, "world_size": job.world_size}
                dist.init_process_group("gloo", timeout=timedelta(seconds=job.timeout), **place)
            return pickle.dumps((True, fn(*args, **kwargs), time.monotonic())), True
    except BaseException:  # also SystemExit and pytest's outcomes: the parent must hear of it
        return pickle.dumps((False, traceback.format_exc(), time.monotonic())), False
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


@contextlib.contextmanager
def _clean_slate(job: Job) -> Iterator[None]:
    """The same state before every function: seeds, defaults, environment, warnings."""
    sys.path[:] = job.path
    for name in _torchrun_environment(job):  # set by a test that was running when this process started
        os.environ.pop(name, None)
    environment, directory = dict(os.environ), os.getcwd()
    if job.setup == "environment":
        os.environ.update(_torchrun_environment(job))
    seed_torch()
    random.seed(0)
    numpy.random.seed(0)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)
    try:
        with warnings.catch_warnings():
            warnings.resetwarnings()
            for action, message, category, module, line in job.filters:
                warnings.filterwarnings(action, message, category, module, line, append=True)
            yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(directory)


def seed_torch() -> None:
    """Sets torch's generators, as `torch.manual_seed` does: it formats stacks for GPUs that are not there."""
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)


@contextlib.contextmanager
def one_gloo_thread() -> Iterator[None]:
    """Inside, each new gloo group has one thread, where torch starts two for every network interface.

    The threads of a group assign the name of each finished collective to one string without a lock. A name of
    over 15 letters may be freed twice: "free(): invalid pointer", or a segmentation fault (torch 2.13).
    `init_process_group` ignores options for gloo, so its constructor is replaced.
    """
    gloo: Any = dist.ProcessGroupGloo
    made = gloo.__init__

    def make(self: Any, store: dist.Store, rank: int, size: int, *given: Any, **named: Any) -> None:
        timeout = named.get("timeout", given[0] if given else timedelta(minutes=30))
        if isinstance(timeout, timedelta):  # else the caller's own options
            options = gloo._Options()
            interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
            options._devices = (
                [gloo.create_device(interface=name) for name in interfaces.split(",")]
                if interfaces
                else [gloo.create_default_device()]
            )
            options._timeout, options._threads = timeout, 1
            given, named = (options,), {}
        made(self, store, rank, size, *given, **named)

    gloo.__init__ = make
    try:
        yield
    finally:
        gloo.__init__ = made


def _torchrun_environment(job: Job) -> dict[str, str]:
    """What torchrun's agent tells its workers; the store is the one that the parent hosts."""
    rank, size = str(job.rank), str(job.world_size)
    found = {"MASTER_ADDR": HOST, "MASTER_PORT": str(job.launcher_port), "GROUP_RANK": "0"}
    found |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    found |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    return found | {"TORCHELASTIC_RUN_ID": "tests"}


def _tear_down() -> None:
    """Leaves nothing of a run behind: no process group, no cached mesh, no cycle with a model."""
    # The reducers of torch's own DDP must not be the last holders of their groups; see `InPlaceDDP`.
    groups = list(dist.distributed_c10d._world.pg_map)
    if dist.is_initialized():
        dist.destroy_process_group()
    clear_dtensor_caches()
    forget_meshes()
    torch._dynamo.reset()
    forget_accelerate()
    for mesh in gc.get_objects():
        if type(mesh) is DeviceMesh:  # torch 2.12 never frees those of DTensors
            mesh._pg_registry.clear()
    gc.collect()
    del groups
    gc.freeze()  # what is left are imports and caches that stay: keeps the next collection short


def forget_accelerate() -> None:
    """Forget accelerate's singletons, which have the process group of an earlier test."""
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState, PartialState

        AcceleratorState._reset_state(True)
        PartialState._reset_state()
        GradientState._reset_state()
