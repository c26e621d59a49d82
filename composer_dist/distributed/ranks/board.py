"""Numbers that the ranks of a group show each other in memory that they share; for groups on one host.

A rank sees what the others show within microseconds of their arrival, where the smallest collective takes
hundreds. The memory is a file without a name (man 2 memfd_create), which the others open below /proc.
"""

import mmap
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, ClassVar, Self

import torch.distributed as dist

from composer_dist.distributed.ranks.failures import LostError
from composer_dist.distributed.ranks.liveness import Identity, has_ended, identify

_WORD = 8
_BITS = 48
"""Of a cell, for the number; the rest counts the turns, of which a rank is at most one ahead."""


class Board:
    """Two cells for each rank, used in turns; `make` makes one."""

    rests: ClassVar[bool] = False
    """Whether boards are not to be used now; see `resting`."""

    def __init__(self, memory: mmap.mmap, rank: int, processes: Sequence[Identity | None]) -> None:
        size = len(processes)
        cells = memoryview(memory).cast("Q")
        self._halves = cells[:size], cells[size : 2 * size]
        self._rank, self._processes = rank, processes
        self._turn = 0

    @classmethod
    def make(cls, group: dist.ProcessGroup) -> Self | None:
        """A board for the ranks of `group`, a collective; None where they do not share memory."""
        rank, size = group.rank(), group.size()
        token, path, descriptor = secrets.token_bytes(_WORD), None, None
        nbytes = 2 * size * _WORD
        if rank == 0:
            with suppress(OSError, AttributeError):  # not Linux
                descriptor = os.memfd_create("composer_dist")
                os.pwrite(descriptor, bytes(nbytes) + token, 0)
                path = f"/proc/{os.getpid()}/fd/{descriptor}"
        shown = _gathered((path, token, identify()), group)
        path, token, _ = shown[0]
        memory = _mapped(path, nbytes, token) if path else None
        able = all(_gathered(memory is not None, group))
        if descriptor is not None:
            os.close(descriptor)
        return cls(memory, rank, [one for _, _, one in shown]) if able and memory else None

    @classmethod
    @contextmanager
    def resting(cls) -> Iterator[None]:
        """Without boards while the body runs: for what stops ranks before collectives, on all of them."""
        cls.rests = True
        try:
            yield
        finally:
            cls.rests = False

    def all_show(self, number: int, limit: timedelta) -> bool:
        """Show a number, and whether all ranks show the same; each of them calls this at its turn.

        Raises:
            LostError: a rank has ended, or does not arrive within the limit.
        """
        self._turn += 1
        turn = self._turn & 0xFFFF
        cells = self._halves[turn & 1]
        mine = cells[self._rank] = turn << _BITS | number & (1 << _BITS) - 1
        for _ in _moments(limit):
            shown = cells.tolist()
            if all(one >> _BITS == turn for one in shown):
                return all(one == mine for one in shown)
            if time.monotonic() > self._look_at:
                self._look_at = time.monotonic() + 0.1
                absent = [rank for rank, one in enumerate(shown) if one >> _BITS != turn]
                if any(has_ended(self._processes[rank]) for rank in absent):
                    raise LostError("another rank has ended")
        raise LostError(f"another rank did not arrive within {limit.total_seconds():.0f} s")

    _look_at = 0.0
    """When to look next whether the others' processes still run."""


def _moments(limit: timedelta) -> Iterator[None]:
    """Moments to look, close together at first, then apart by a twentieth of what has been waited."""
    start = time.monotonic()
    for _ in range(20):
        yield
        os.sched_yield()
    while (waited := time.monotonic() - start) < limit.total_seconds():
        time.sleep(min(max(waited / 20, 2e-5), 2e-3))
        yield


def _gathered(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def _mapped(path: str, nbytes: int, token: bytes) -> mmap.mmap | None:
    """The first bytes of a file that ends with the token, shared; None where it is another file, or none."""
    with suppress(OSError, ValueError), open(path, "r+b") as file:
        if file.read()[nbytes:] == token:
            return mmap.mmap(file.fileno(), nbytes)
    return None
