"""Reading another process's memory into tensors on a device, by way of two host buffers.

While one buffer is uploaded, the next read fills the other. The buffers are pinned where there is an
accelerator, so that uploads go by themselves; every rank uploads over its own link.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from composer_dist.distributed import peer_memory
from composer_dist.distributed.peer_memory import Range

_ENOUGH = 32 << 20
"""Bytes of a buffer from which a larger one gains nothing."""


class Staging:
    """Two host buffers, of together `nbytes` at most, on the way to `device`."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._device = device
        self._size = max(1, min(nbytes // 2, _ENOUGH))
        pinned = device.type != "cpu"
        self._buffers = [
            torch.empty(self._size, dtype=torch.uint8, device="cpu", pin_memory=pinned) for _ in range(2)
        ]
        self._uploaded: list[torch.Event | None] = [None, None]
        self._used = 0
        self._ranges: list[Range] = []
        self._uploads: list[tuple[torch.Tensor, torch.Tensor]] = []

    def read(self, pid: int, parcels: Iterable[tuple[torch.Tensor, Iterable[tuple[int, int]]]]) -> None:
        """Fill targets from the memory of a process; returns when they are filled.

        Args:
            parcels: a target, flat and of bytes, and the (address, bytes) that fill it, in order.

        Raises:
            ParallelismRuntimeError: the memory cannot be read.
        """
        for target, runs in parcels:
            start = stop = 0  # of the target: what lies in the present buffer
            for address, nbytes in runs:
                while nbytes:
                    count = min(nbytes, self._size - self._used)
                    self._ranges.append(Range(address, self._buffers[0].data_ptr() + self._used, count))
                    address, nbytes = address + count, nbytes - count
                    self._used, stop = self._used + count, stop + count
                    if self._used == self._size:
                        self._intend(target[start:stop])
                        self._flush(pid)
                        start = stop
            self._intend(target[start:stop])
        self._flush(pid)
        for event in self._uploaded:
            if event is not None:
                event.synchronize()

    def _intend(self, target: torch.Tensor) -> None:
        """The last bytes of the present buffer are for this target."""
        held = self._buffers[0][self._used - target.numel() : self._used]
        self._uploads.append((target, held))

    def _flush(self, pid: int) -> None:
        """Read into the present buffer, start its uploads, and turn to the other one."""
        peer_memory.read(pid, self._ranges)
        for target, held in self._uploads:
            target.copy_(held, non_blocking=True)
        if self._device.type != "cpu":
            self._uploaded[0] = torch.accelerator.current_stream(self._device).record_event()
        self._used, self._ranges, self._uploads = 0, [], []
        self._buffers.reverse()
        self._uploaded.reverse()
        if (event := self._uploaded[0]) is not None:
            event.synchronize()
