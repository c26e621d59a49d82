"""Numbers and data that the ranks of a group show each other in memory that they share; for one host.

A rank sees what the others show within microseconds of their arrival, where the smallest collective takes
hundreds. The memory is a file without a name (man 2 memfd_create), which the others open below /proc.
"""

import mmap
import os
import platform
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist

from composer_dist.distributed.ranks.failures import LostError
from composer_dist.distributed.ranks.liveness import Identity, has_ended, identify

_WORD = 8
_PAGE = 4096
_ROOM = 4 << 20
"""Bytes for the data of one rank in one turn; they take memory once they are used."""
_BITS = 48
"""Of a cell, for the number; the rest counts the turns, of which a rank is at most one ahead."""


class Board:
    """For each rank two cells, and room for data, used in turns; `make` makes one."""

    rests: ClassVar[bool] = False
    """Whether boards are not to be used now; see `resting`."""

    def __init__(self, memory: mmap.mmap, rank: int, processes: Sequence[Identity | None]) -> None:
        size = len(processes)
        cells = memoryview(memory)[: 2 * size * _WORD].cast("Q")
        self._halves = cells[:size], cells[size:]
        data = torch.frombuffer(memory, dtype=torch.uint8, offset=_cells_nbytes(size))
        self._data = data.view(2, size, _ROOM)
        self._places: dict[tuple[int, int, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}
        self._rank, self._processes = rank, processes
        self._turn = 0

    @classmethod
    def make(cls, group: dist.ProcessGroup) -> Self | None:
        """A board for the ranks of `group`, a collective; None where they do not share memory."""
        rank, size = group.rank(), group.size()
        token, path, descriptor = secrets.token_bytes(_WORD), None, None
        nbytes = _cells_nbytes(size) + 2 * size * _ROOM
        if rank == 0:
            with suppress(OSError, AttributeError):  # not Linux
                descriptor = os.memfd_create("composer_dist")
                os.pwrite(descriptor, token, nbytes)
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

    def places(self, data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Where this rank puts flat `data` of the next turn, and what all put then, `(ranks, numel)`.

        The second may be read until this rank's next turn but one, once all ranks show the number of that
        turn. None if there is no room, or if a processor may show a number before the data.
        """
        if data.nbytes > _ROOM or data.device.type != "cpu" or platform.machine() not in _ORDERED:
            return None
        key = (self._turn + 1) & 1, data.numel(), data.dtype
        if key not in self._places:
            with torch.inference_mode(False):
                rows = self._data[key[0]].view(data.dtype)[:, : data.numel()]
                self._places[key] = rows[self._rank], rows
        return self._places[key]

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
            if shown.count(mine) == len(shown):
                return True
            if all(one >> _BITS == turn for one in shown):
                return False
            if time.monotonic() > self._look_at:
                self._look_at = time.monotonic() + 0.1
                absent = [rank for rank, one in enumerate(shown) if one >> _BITS != turn]
                if any(has_ended(self._processes[rank]) for rank in absent):
                    raise LostError("another rank has ended")
        raise LostError(f"another rank did not arrive within {limit.total_seconds():.0f} s")

    _look_at = 0.0
    """When to look next whether the others' processes still run."""


_ORDERED = ("x86_64", "AMD64")
"""Processors that show others what they write in the order in which they write it."""


def _cells_nbytes(size: int) -> int:
    return -(-2 * size * _WORD // _PAGE) * _PAGE


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
        file.seek(nbytes)
        if file.read() == token:
            return mmap.mmap(file.fileno(), nbytes)
    return None
