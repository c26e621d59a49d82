"""Host memory for large tensors that will be written once from end to end.

The first touch of fresh memory costs more than the copy into it: the kernel clears and maps page by
page. Pages of 2 MiB instead of 4 KiB halve that, where the kernel gives them when asked (Linux with
transparent huge pages in mode "madvise" or "always"; Documentation/admin-guide/mm/transhuge.rst).
`docs/performance.md` has the measurement.
"""

from __future__ import annotations

import mmap
from math import prod

import torch

_WORTH = 4 << 20
"""Bytes from which memory is worth a mapping of its own: two huge pages."""


_ALIGNED = 64
"""A cache line, and what torch's own allocator aligns to."""


_CPU = torch.device("cpu")


class Arena:
    """Memory for several tensors, given back when the last of them is gone; ordinary memory on accelerators.

    Each tensor has a storage of its own size, so that saving one saves nothing of its neighbors.
    """

    def __init__(self, nbytes: int, device: torch.device = _CPU) -> None:
        self._memory: mmap.mmap | None = None
        self._used = 0
        self._device = device
        if nbytes >= _WORTH and device.type == "cpu" and hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            try:
                self._memory.madvise(mmap.MADV_HUGEPAGE)
            except OSError:  # a kernel without them
                self._memory = None

    def reuse(self) -> None:
        """Hand out the same memory again: nobody needs the tensors made so far any more."""
        self._used = 0

    def empty(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialized, contiguous tensor; from elsewhere once the arena is full (see `padded_bytes`)."""
        count = prod(size)
        if self._memory is None or not count or self._used + padded_bytes(size, dtype) > len(self._memory):
            return torch.empty(size, dtype=dtype, device=self._device)
        tensor = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=self._used).view(size)
        self._used += padded_bytes(size, dtype)
        return tensor


def padded_bytes(size: tuple[int, ...], dtype: torch.dtype) -> int:
    """What a tensor takes in an arena."""
    return -(-prod(size) * dtype.itemsize // _ALIGNED) * _ALIGNED


def empty(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`torch.empty`, from an arena of its own in host memory."""
    return Arena(padded_bytes(size, dtype), device).empty(size, dtype)
