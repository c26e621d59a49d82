"""A pool of worker processes that run test functions on several ranks.

`run(fn, 2, *args)` calls `fn(*args)` on ranks 0 and 1 of a fresh gloo group and returns what each
rank returned. The function goes to the workers by reference, so it stands at module level; its
arguments and its result travel as pickles, by value. `@on_ranks(2)` makes such a function the test.

The workers are forked from a server, start when first needed, and live until the test session ends. In
a run of many tests the server is a fork of pytest's own process, which has imported all test modules;
else it imports torch. What keeps tests apart: each run has its own process group over
its own part of one store, and random state, defaults, environment, working directory and warning
filters are set anew. After a failure, be it an exception, a death or a hang, the workers that took
part are replaced.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import logging
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection, arbitrary_address, wait
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from tests.kit.worker import HOST, Job, Setup, serve

START_LIMIT = 180.0
"""Seconds that a worker may take to start; the first one waits for the server to import torch."""
World = Callable[..., list[Any]]
"""What the fixtures `world1`, `world2` and `world4` are: `world2(fn, *args, timeout=60, **kwargs)`."""
GRACE = 15.0
"""Seconds that the other ranks get to return or fail once one rank has failed."""
PRELOAD = [
    "tests.kit.garbage",
    "pytest",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
]
"""What the server imports; the workers forked from it have it for nothing."""
if "PYTEST_XDIST_WORKER" in os.environ:  # a run of many tests: most workers import this sooner or later
    PRELOAD += ["torch._inductor.compile_fx"]


def fork_server() -> None:
    """Makes this process, with all that it has imported, the one that workers are forked from."""
    server: Any = forkserver._forkserver
    # Python warns of forks beside threads; that of execnet only reads.
    with socket.socket(socket.AF_UNIX) as listener, warnings.catch_warnings(action="ignore"):
        address = arbitrary_address("AF_UNIX")
        listener.bind(address)
        listener.listen()
        alive_r, alive_w = os.pipe()
        if not (pid := os.fork()):
            os.close(alive_w)
            _serve_forks(listener.detach(), alive_r)
    os.close(alive_r)
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, alive_w, pid


def _serve_forks(listener: int, alive: int) -> NoReturn:
    """Without what pytest has changed for its own process."""
    try:
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__
        logging.getLogger().handlers.clear()
        warnings.simplefilter("ignore")
        gc.freeze()
        forkserver.main(listener, alive, PRELOAD)
    finally:
        os._exit(0)


class WorkerError(AssertionError):
    """At least one rank failed, died or overran its limit.

    Attributes:
        errors: what happened, by rank, the first failure first: the traceback as text, or how the
            worker ended.
        results: what the other ranks returned.
    """

    def __init__(self, errors: dict[int, str], results: dict[int, Any]) -> None:
        self.errors = errors
        self.results = results
        super().__init__("".join(f"\n--- rank {rank}\n{text.rstrip()}" for rank, text in errors.items()))


def on_ranks(
    size: int | str | Callable[..., int], timeout: float = 60.0, gloo_threads: int = 1
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test of a function that every rank of a world runs; it returns nothing and asserts on its rank.

    Args:
        size: how many ranks, the name of the test's argument that says so, or a function of its arguments.
        timeout: seconds for the test, and for each collective in it.
        gloo_threads: 1 or 2, torch's number; see `one_gloo_thread`.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            __tracebackhide__ = True
            ranks = arguments[size] if isinstance(size, str) else size
            ranks = ranks(**arguments) if callable(ranks) else ranks
            settings: Any = {"timeout": timeout, "gloo_threads": gloo_threads}
            run(_Body(body.__module__, body.__name__), ranks, **settings, **arguments)

        return test

    return decorate


@dataclass(frozen=True)
class _Body:
    """What `on_ranks` decorates; its name in the module is the test's, so it has no reference of its own."""

    module: str
    name: str

    def __call__(self, **arguments: Any) -> None:
        getattr(importlib.import_module(self.module), self.name).__wrapped__(**arguments)


class _Worker:
    """The parent's side of one process."""

    def __init__(self, index: int, port: int, log: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, port, str(log)), name=f"world-{index}")
        log.touch()
        self._log = log.open("rb")
        self.process.start()
        theirs.close()

    def await_start(self) -> None:
        """Returns when the worker takes jobs."""
        try:
            started = self.connection.poll(START_LIMIT) and bool(self.connection.recv_bytes())
        except EOFError:
            started = False
        if not started:
            self.kill(dump=True)
            raise RuntimeError(f"{self.process.name} did not start:\n{self.output()}")

    def send(self, message: bytes) -> None:
        """Sends; that the worker has died shows when its answer is awaited."""
        with contextlib.suppress(BrokenPipeError):
            self.connection.send_bytes(message)

    def output(self) -> str:
        """What the worker wrote to stdout and stderr since the last call."""
        return self._log.read().decode(errors="replace")

    def kill(self, *, dump: bool = False) -> None:
        """Ends the worker and its children; with `dump`, has it write its Python stacks first."""
        if dump and self.process.is_alive() and self.process.pid:
            os.kill(self.process.pid, signal.SIGUSR1)
            self.process.join(5)
        try:
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        except ProcessLookupError:
            self.process.kill()
        self.process.join()

    def close(self) -> None:
        """Releases the parent's handles of a worker that has ended."""
        self.connection.close()
        self._log.close()
        self.process.close()


@dataclass
class _Pool:
    """The workers; a world of n ranks takes the first n."""

    workers: list[_Worker] = field(default_factory=list)
    runs: int = 0
    started: int = 0
    store: dist.TCPStore | None = None
    directory: Path | None = None

    def run(
        self,
        fn: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout: float = 60.0,
        setup: Setup = "group",
        gloo_threads: int = 1,
        **kwargs: Any,
    ) -> list[Any]:
        """Calls `fn(*args, **kwargs)` on every rank of a world and returns the results by rank.

        Args:
            fn: a function at the top level of an importable module.
            world_size: how many workers take part.
            timeout: seconds for the call, and for each collective in it.
            setup: `"group"` gives a gloo process group and no environment variables,
                `"environment"` sets what torchrun sets and leaves the group to `fn`,
                `"nothing"` leaves both out.
            gloo_threads: of each gloo group; see `one_gloo_thread`.

        Raises:
            WorkerError: with the traceback of each rank that failed.
        """
        __tracebackhide__ = True
        call = pickle.dumps((fn, args, kwargs))
        self.runs += 1
        try:
            workers = self._ready(world_size)
            # A launcher's store holds one world's keys, without a prefix: a new one each time.
            launcher = _host_store() if setup == "environment" else None
            port, filters = launcher.port if launcher else 0, _warning_filters()
            for rank, worker in enumerate(workers):
                who = (self.runs, rank, world_size)
                job = Job(*who, timeout, setup, gloo_threads, port, sys.path, filters, call)
                worker.send(pickle.dumps(job))
            results, errors = self._collect(workers, timeout)
        except BaseException:  # Ctrl-C among others: leave no worker in an unknown state
            self._drop(world_size)
            raise
        for rank, worker in enumerate(workers):
            if text := worker.output():
                print(f"[rank {rank}] " + text.rstrip().replace("\n", f"\n[rank {rank}] "))
        if errors:
            self._drop(world_size)
            raise WorkerError(errors, results)
        for worker in workers:
            worker.send(b"released")
        return [results[rank] for rank in range(world_size)]

    def stop(self) -> None:
        """Ends every worker; a later `run` starts fresh ones."""
        self._drop(len(self.workers))
        self.store = None
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)
            self.directory = None

    def _ready(self, world_size: int) -> list[_Worker]:
        """The first `world_size` workers, started where there is none or it has died."""
        if self.directory is None:
            self.directory = Path(tempfile.mkdtemp(prefix="world-"))
        if self.store is None:
            self.store = _host_store()
        if not all(worker.process.is_alive() for worker in self.workers):
            self._drop(len(self.workers))
        fresh = []
        for index in range(len(self.workers), world_size):
            self.started += 1
            fresh.append(_Worker(index, self.store.port, self.directory / f"{self.started}.log"))
            self.workers.append(fresh[-1])
        for worker in fresh:
            worker.await_start()
        return self.workers[:world_size]

    def _drop(self, count: int) -> None:
        """Ends the first `count` workers."""
        dropped, self.workers = self.workers[:count], self.workers[count:]
        for worker in dropped:
            worker.kill()
            worker.close()

    @staticmethod
    def _collect(workers: list[_Worker], timeout: float) -> tuple[dict[int, Any], dict[int, str]]:
        """Waits for every rank's answer, and ends the ranks that give none in time."""
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        failed: dict[int, float] = {}
        deadline = time.monotonic() + timeout
        pending = {worker.connection: rank for rank, worker in enumerate(workers)}
        while pending:
            answered = wait(list(pending), max(deadline - time.monotonic(), 0))
            if not answered:
                break
            for connection in answered:
                assert isinstance(connection, Connection)
                rank = pending.pop(connection)
                try:
                    succeeded, value, ended = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    succeeded, value, ended = False, _last_words(workers[rank]), time.monotonic()
                if succeeded:
                    results[rank] = value
                    continue
                errors[rank], failed[rank] = value, ended
                deadline = min(deadline, time.monotonic() + GRACE)
        # By when they failed: the one that fails first tears its sockets down before it answers.
        errors = {rank: errors[rank] for rank in sorted(errors, key=failed.__getitem__)}
        why = f"within {GRACE:.0f} s of the first failure" if errors else f"in {timeout:g} s"
        for rank in pending.values():
            workers[rank].kill(dump=True)
            errors[rank] = f"did not return {why}; its stacks:\n{workers[rank].output()}"
        return results, errors


def _host_store() -> dist.TCPStore:
    """A store in this process, as torchrun's agent has it: no dying worker takes it along."""
    return dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)


def _last_words(worker: _Worker) -> str:
    worker.process.join(5)
    code = worker.process.exitcode
    return f"the worker died with exit code {code}\n{worker.output()}"


def _warning_filters() -> list[tuple[str, str, type[Warning], str, int]]:
    """This process's filters, so that a warning in a worker counts as it would in the test."""

    def pattern(part: Any) -> str:
        return str(getattr(part, "pattern", part) or "")

    return [
        (action, pattern(message), category, pattern(module), line)
        for action, message, category, module, line in warnings.filters
    ]


_pool = _Pool()
run, stop = _pool.run, _pool.stop
atexit.register(stop)
