"""Reading the memory of another process on the same host: one copy, no socket, all readers at once.

This is Linux cross-memory attach (`process_vm_readv`, man 2), which MPI libraries use between ranks of
a host. The kernel allows it between processes of one user; where Yama restricts it to descendants, a
process may permit another one (`PR_SET_PTRACER`, man 2 prctl) and that one's descendants. To find out
whether it works, the ranks try: a process shows a *beacon*, random bytes at an address, and a process
that can read them there is on the same host, in the same pid namespace, and permitted.

`Staging` reads into tensors on an accelerator through two pinned host buffers: while one buffer is
uploaded, the next read fills the other. Every rank uploads over its own link.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch

from composer_dist.distributed.moving.messages import in_buckets
from composer_dist.errors import ParallelismRuntimeError
from composer_dist.tensors.pages import STEP, provide


def pins(wanted: bool | None, device_type: str) -> bool:
    """Whether host copies of tensors on this device type are pinned; None pins them for accelerators."""
    return device_type != "cpu" if wanted is None else wanted


def check_pinning(users: Sequence[str]) -> None:
    """Raise a ParallelismRuntimeError if there are users of pinned memory, but no accelerator."""
    if users and not torch.accelerator.is_available():
        raise ParallelismRuntimeError(
            f"{users[0]} needs an accelerator, and this machine has none; use cpu_offload=True or "
            "pin_memory=None, which pin memory for accelerators only."
        )


_ENOUGH = 32 << 20
"""Bytes of a buffer from which a larger one gains nothing."""


class Staging:
    """Two host buffers, together at most `nbytes`, through which data is uploaded to `device`."""

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

        A parcel is a target, flat and of bytes, and the (address, bytes) that fill it, in order.
        """
        for target, runs in parcels:
            start = stop = 0  # of the target: what is in the current buffer
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
        """Note that the last bytes of the current buffer belong to this target."""
        held = self._buffers[0][self._used - target.numel() : self._used]
        self._uploads.append((target, held))

    def _flush(self, pid: int) -> None:
        """Read into the current buffer, start its uploads, and turn to the other one."""
        read(pid, self._ranges, fresh=self._device.type == "cpu")
        for target, held in self._uploads:
            target.copy_(held, non_blocking=True)
        if self._device.type != "cpu":
            self._uploaded[0] = torch.accelerator.current_stream(self._device).record_event()
        self._used, self._ranges, self._uploads = 0, [], []
        self._buffers.reverse()
        self._uploaded.reverse()
        if (event := self._uploaded[0]) is not None:
            event.synchronize()


_PR_SET_PTRACER = 0x59616D61  # "Yama": linux/prctl.h
_IOV_MAX = 1024  # linux/uio.h: ranges in one call
_MAX_BYTES = 2 * STEP  # of one call; the kernel's own limit is just below 2 GiB (man 2 read)


class Range(NamedTuple):
    """Memory to copy, from an address in the other process to an address in this one."""

    theirs: int
    mine: int
    nbytes: int


class Beacon:
    """Bytes by which other processes find out whether they can read this one's memory."""

    def __init__(self) -> None:
        self._bytes = ctypes.create_string_buffer(secrets.token_bytes(16), 16)

    def describe(self) -> dict[str, Any]:
        """Where the bytes are and what they are, in plain types."""
        return {"pid": os.getpid(), "address": ctypes.addressof(self._bytes), "bytes": self._bytes.raw.hex()}


def can_read(beacon: dict[str, Any]) -> bool:
    """Whether the process that shows `beacon` can be read from here."""
    if _libc() is None:
        return False
    mine = ctypes.create_string_buffer(16)
    try:
        read(beacon["pid"], [Range(beacon["address"], ctypes.addressof(mine), 16)])
    except ParallelismRuntimeError:
        return False
    return bool(mine.raw.hex() == beacon["bytes"])


def read(pid: int, ranges: Sequence[Range], fresh: bool = False) -> None:
    """Copy memory of process `pid` into this one, without the interpreter's lock.

    Args:
        fresh: this process's memory may have no pages yet.
    """
    libc = _libc()
    if libc is None:
        raise ParallelismRuntimeError("This system has no process_vm_readv.")
    for batch in _batches(ranges):
        local = (_IoVec * len(batch))(*[_IoVec(part.mine, part.nbytes) for part in batch])
        remote = (_IoVec * len(batch))(*[_IoVec(part.theirs, part.nbytes) for part in batch])
        wanted = sum(part.nbytes for part in batch)
        for part in batch if fresh else ():
            provide(part.mine, part.nbytes)
        got = libc.process_vm_readv(pid, local, len(batch), remote, len(batch), 0)
        if got != wanted:
            why = os.strerror(ctypes.get_errno()) if got < 0 else f"{got} of {wanted} bytes"
            raise ParallelismRuntimeError(f"Reading the memory of process {pid} failed: {why}.")


@contextmanager
def readable_by_siblings() -> Iterator[None]:
    """Permit the other processes of this one's launcher to read its memory while the body runs."""
    libc = _libc()
    if libc is not None:
        libc.prctl(_PR_SET_PTRACER, os.getppid(), 0, 0, 0)  # fails where there is no Yama to ask
    try:
        yield
    finally:
        if libc is not None:
            libc.prctl(_PR_SET_PTRACER, 0, 0, 0, 0)


def address_of(tensor: torch.Tensor, dtype: torch.dtype) -> int | None:
    """Where a tensor's bytes lie in a row, as this dtype, in host memory; None if they do not."""
    if tensor.device.type != "cpu" or tensor.dtype != dtype or not tensor.is_contiguous():
        return None
    return tensor.data_ptr()


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


@cache
def _libc() -> Any:
    """The C library, if it can read other processes' memory."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "process_vm_readv"):
        return None
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    pair = (ctypes.c_void_p, ctypes.c_ulong)
    libc.process_vm_readv.argtypes = (ctypes.c_int, *pair, *pair, ctypes.c_ulong)
    libc.prctl.argtypes = (ctypes.c_int, *(ctypes.c_ulong,) * 4)
    return libc


def _batches(ranges: Sequence[Range]) -> Iterator[list[Range]]:
    """Ranges cut and gathered so that each batch is within the kernel's limits."""
    cut = (
        Range(theirs + start, mine + start, min(_MAX_BYTES, nbytes - start))
        for theirs, mine, nbytes in ranges
        for start in range(0, nbytes, _MAX_BYTES)
    )
    for bucket in in_buckets(cut, lambda one: one.nbytes, _MAX_BYTES):
        for start in range(0, len(bucket), _IOV_MAX):
            yield bucket[start : start + _IOV_MAX]
