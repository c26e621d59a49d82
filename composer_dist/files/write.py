"""Writes tensors to their offsets in files, with several threads and any number of ranks.

Data in host memory is written directly (`os.pwrite`, which lets other threads run meanwhile); the rest
passes through a staging buffer of fixed size, one per thread.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from composer_dist.errors import CheckpointRuntimeError
from composer_dist.files.slabs import BATCH_BYTES, STAGE_BYTES, Buffers, Slab, lent, move_in_threads
from composer_dist.progress import Stage


def create(path: Path, header: bytes, size: int) -> None:
    """Make a file of its final size, for the ranks to fill."""
    with _named(path), open(path, "xb") as file:
        file.write(header)
        file.truncate(size)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointRuntimeError(f"Cannot write {path}: {error.strerror}.") from error


class NewFiles:
    """Files to write to, opened when first used; a context manager that closes them."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self._open: dict[int, int] = {}

    def __enter__(self) -> NewFiles:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)

    def flush(self) -> None:
        """Wait until everything written is on the disk."""
        for number, descriptor in self._open.items():
            with _named(self.paths[number]):
                os.fsync(descriptor)

    def open(self, number: int) -> None:
        """Open a file; not from several threads."""
        if number not in self._open:
            with _named(self.paths[number]):
                self._open[number] = os.open(self.paths[number], os.O_WRONLY | getattr(os, "O_CLOEXEC", 0))

    def write(self, number: int, offset: int, address: int, nbytes: int) -> None:
        """Write a piece of memory to an offset.

        Raises:
            CheckpointRuntimeError: the system reports an error, such as a full disk.
        """
        view = memoryview((ctypes.c_char * nbytes).from_address(address))
        with _named(self.paths[number]):
            while view:
                done = os.pwrite(self._open[number], view, offset)
                view, offset = view[done:], offset + done


def write_slabs(slabs: Sequence[Slab], target: NewFiles, stage: Stage) -> int:
    """Write tensors' elements to their places; returns the bytes that were written.

    Args:
        slabs: each contiguous in the file along its last dimension, or of elements written singly.
        stage: shows the progress.

    Raises:
        CheckpointRuntimeError: a write fails.
    """
    slabs = sorted((slab for slab in slabs if slab.nbytes), key=lambda slab: (slab.file, slab.offset))
    for number in {slab.file for slab in slabs}:
        target.open(number)
    staged = [slab for slab in slabs if not _is_direct(slab)]
    stage.expect(sum(slab.nbytes for slab in slabs))

    def move(piece: Slab, buffers: Buffers) -> int:
        if _is_direct(piece):
            for offset, start in piece.rows():
                address = piece.target.data_ptr() + start * piece.dtype.itemsize
                target.write(piece.file, offset, address, piece.run)
        else:
            with lent(buffers) as buffer:
                _write_staged(piece, target, buffer)
        return piece.nbytes

    limits = ((slab, BATCH_BYTES if _is_direct(slab) else STAGE_BYTES) for slab in slabs)
    pieces = (piece for slab, limit in limits for piece in slab.cut_to(limit, lambda one: one.nbytes))
    return move_in_threads(move, pieces, staged, "write", stage)


def write_tensor(tensor: torch.Tensor, target: NewFiles, number: int, offset: int) -> int:
    """Write all of a tensor in host memory to one place; returns its bytes."""
    tensor = tensor.detach().contiguous()
    target.open(number)
    if tensor.nbytes:
        target.write(number, offset, tensor.data_ptr(), tensor.nbytes)
    return tensor.nbytes


def _is_direct(slab: Slab) -> bool:
    """Whether rows are laid out in host memory as in the file."""
    return slab.target.device.type == "cpu" and slab.contiguous


@torch.no_grad()
def _write_staged(slab: Slab, target: NewFiles, buffer: torch.Tensor) -> None:
    """Copy a piece to a staging buffer, in the order of the file, and write it from there."""
    packed = buffer[: slab.nbytes].view(slab.dtype).view(slab.sizes)
    where = slab.target.storage_offset() + slab.start
    packed.copy_(slab.target.as_strided(slab.sizes, slab.steps, where))
    address, item = buffer.data_ptr(), slab.dtype.itemsize
    together = slab.strides[-1] == 1 or slab.sizes[-1] == 1
    count, length = (1, slab.run) if together else (slab.sizes[-1], item)
    for offset, _ in slab.rows():
        for index in range(count):
            target.write(slab.file, offset + index * slab.strides[-1] * item, address, length)
            address += length
