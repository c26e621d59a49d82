"""Faults for one rank at one step, and a world of processes in which they are tried.

`python -m tests.kit.faults` tries every cell and prints a table.
"""

import argparse
import ctypes
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from composer_dist.distributed.ranks.loopback import HOST, host_store

LIMIT = 60.0
"""Seconds in which every rank has to end."""


class Fault(NamedTuple):
    """What happens to a rank, once, at a step of its run."""

    rank: int
    step: str
    kind: str


class StruckError(Exception):
    """Raised by a fault, as by the user's own code."""


def _raise() -> None:
    raise StruckError("struck")


def _stall() -> None:
    while True:
        time.sleep(1)


KINDS: dict[str, Callable[[], Any]] = {
    "raise": _raise,
    "stall": _stall,
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit(0)": lambda: os._exit(0),
    "GIL": lambda: ctypes.PyDLL(None).sleep(10_000),  # a call in C that keeps Python's lock
    "memory": lambda: bytearray(1 << 62),
}
STEPS = {
    "setup": "setup",
    "before_dataloader": "the data of batch 2",
    "before_forward": "the forward of batch 2",
    "before_backward": "the backward of batch 2",
    "after_train_batch": "the optimizer step of batch 2",
    "eval_batch_start": "evaluation",
    "state_dict": "the checkpoint",
    "load_state_dict": "loading",
}
"""Where `tests.kit.scripts.struck` is struck: events of callbacks and calls of them, and setup."""


@dataclass
class Ended:
    """How a rank has ended."""

    status: int | None
    """None if it had to be killed; -n for signal n."""
    seconds: float
    """Since the start of the world."""
    text: str
    """What it has printed to standard error."""


def struck_world(fault: Fault, folder: Path, ranks: int = 2, limit: float = LIMIT) -> list[Ended]:
    """A world of `tests.kit.scripts.struck` with a fault; rank 0 hosts the store."""
    with started(["-m", "tests.kit.scripts.struck", str(folder), *map(str, fault)], ranks, folder) as world:
        return ended(world, folder, limit)


@contextmanager
def started(command: list[str], ranks: int, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes of one world, without a launcher; whatever they leave is killed at the end."""
    store = host_store()
    variables = {"MASTER_ADDR": HOST, "MASTER_PORT": str(store.port), "WORLD_SIZE": str(ranks)}
    del store  # frees the port: rank 0 hosts it
    world = []
    for rank in range(ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
        with (folder / f"stderr-{rank}").open("wb") as errors:
            world.append(
                subprocess.Popen(
                    [sys.executable, *command],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    env=os.environ | variables | own,
                    start_new_session=True,
                )
            )
    try:
        yield world
    finally:
        for process in world:
            for one in left_by(process):
                with suppress(psutil.Error):
                    one.kill()
            process.kill()
            process.wait()


def ended(world: list[subprocess.Popen[bytes]], folder: Path, limit: float = LIMIT) -> list[Ended]:
    """How each rank has ended, after at most `limit` seconds."""
    began, found = time.monotonic(), dict[int, Ended]()
    while len(found) < len(world) and time.monotonic() - began < limit:
        for rank, process in enumerate(world):
            if rank not in found and process.poll() is not None:
                seconds = time.monotonic() - began
                found[rank] = Ended(process.returncode, seconds, _printed(folder, rank))
        time.sleep(0.05)
    return [
        found.get(rank) or Ended(None, time.monotonic() - began, _printed(folder, rank))
        for rank in range(len(world))
    ]


def left_by(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The processes that a rank has started and that are still there: those of its session."""
    found = []
    for one in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getsid(one.pid) == process.pid and one.pid != process.pid:
                found.append(one)
    return found


def _printed(folder: Path, rank: int) -> str:
    return (folder / f"stderr-{rank}").read_text(errors="replace")


def verdict(fault: Fault, world: list[Ended]) -> str:
    """What is wrong with how a world has ended; nothing if it is as promised."""
    wrong = []
    for rank, one in enumerate(world):
        if rank == fault.rank and fault.kind in ("SIGKILL", "exit(0)"):
            continue
        if one.status is None:
            wrong.append(f"rank {rank} hangs")
            continue
        if one.status == 0:
            wrong.append(f"rank {rank} ends with 0")
        if rank == fault.rank:
            continue
        if f"rank {fault.rank}" not in one.text.lower():
            wrong.append(f"rank {rank} does not name the rank")
        if not _names_step(one.text, fault.step):
            wrong.append(f"rank {rank} does not name the step")
        if not any(word in one.text for word in _CAUSES[fault.kind]):
            wrong.append(f"rank {rank} does not name the cause")
    return "; ".join(wrong)


_CAUSES = {
    "raise": ("struck",),
    "stall": ("is still in", "did not answer"),
    "SIGSTOP": ("is stopped", "did not answer", "does not answer"),
    "SIGKILL": ("ended", "died"),
    "exit(0)": ("ended", "died"),
    "GIL": ("is blocked", "did not answer"),
    "memory": ("MemoryError", "OutOfMemory", "memory"),
}


def _names_step(text: str, step: str) -> bool:
    words = {
        "setup": ("set-up", "plan"),
        "state_dict": ("checkpoint", "save", "saving"),
        "load_state_dict": ("load", "resum", "set-up"),
    }
    return any(word in text for word in words.get(step, ("batch 2", "evaluation", "step 2")))


def main() -> None:
    """Try every cell and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", nargs="*", default=list(STEPS))
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--ranks", nargs="*", type=int, default=[0, 1])
    given = parser.parse_args()
    print("| step | rank | " + " | ".join(given.kinds) + " |")
    print("|---" * (2 + len(given.kinds)) + "|")
    wrong = 0
    for step, rank in itertools.product(given.steps, given.ranks):
        cells = []
        for kind in given.kinds:
            fault = Fault(rank, step, kind)
            with tempfile.TemporaryDirectory() as folder:
                world = struck_world(fault, Path(folder))
            found = verdict(fault, world)
            wrong += bool(found)
            cells.append(found or f"{max(one.seconds for one in world):.0f} s")
        print(f"| {STEPS[step]} | {rank} | " + " | ".join(cells) + " |", flush=True)
    print(f"\n{wrong} of {len(given.steps) * len(given.ranks) * len(given.kinds)} cells are not as promised.")


if __name__ == "__main__":
    main()
