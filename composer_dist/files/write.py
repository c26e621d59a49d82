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
from composer_dist.files.slabs import (
    BATCH_BYTES,
    STAGE_BYTES,
    THREADS,
    Slab,
    batches,
    in_threads,
    staging_buffers,
)
from composer_dist.progress import Stage


def create(path: Path, header: bytes, size: int) -> None:
    """Make a file of its final size, for the ranks to fill.

    Raises:
        CheckpointRuntimeError: the system reports an error.
    """
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
    buffers = staging_buffers(staged, THREADS)
    stage.expect(sum(slab.nbytes for slab in slabs))

    def work(pieces: list[Slab]) -> None:
        for piece in pieces:
            if _is_direct(piece):
                _write(piece, target, piece.target.data_ptr(), piece.rows())
            else:
                buffer = buffers.get()
                try:
                    _write_staged(piece, target, buffer)
                finally:
                    buffers.put(buffer)
            stage.advance(piece.nbytes)

    in_threads(work, batches(_pieces(slabs)), "write")
    return sum(slab.nbytes for slab in slabs)


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


def _pieces(slabs: Sequence[Slab]) -> Iterator[Slab]:
    for slab in slabs:
        yield from _cut(slab, BATCH_BYTES if _is_direct(slab) else STAGE_BYTES)


def _cut(slab: Slab, limit: int) -> Iterator[Slab]:
    """The slab in pieces of at most `limit` bytes."""
    if slab.nbytes <= limit:
        yield slab
        return
    dim = next(dim for dim, size in enumerate(slab.sizes) if size > 1)
    for piece in slab.cut(dim, max(1, slab.sizes[dim] * limit // slab.nbytes)):
        yield from _cut(piece, limit)


def _write(slab: Slab, target: NewFiles, base: int, rows: Iterator[tuple[int, int]]) -> None:
    for offset, start in rows:
        target.write(slab.file, offset, base + start * slab.dtype.itemsize, slab.run)


@torch.no_grad()
def _write_staged(slab: Slab, target: NewFiles, buffer: torch.Tensor) -> None:
    """Copy a piece to a staging buffer, in the order of the file, and write it from there."""
    packed = buffer[: slab.nbytes].view(slab.dtype).view(slab.sizes)
    where = slab.target.storage_offset() + slab.start
    packed.copy_(slab.target.as_strided(slab.sizes, slab.steps, where))
    row = slab.sizes[-1] if slab.strides[-1] == 1 else 1
    if row == 1 and slab.sizes[-1] > 1:
        for number, offset in enumerate(_singly(slab)):
            place = buffer.data_ptr() + number * slab.dtype.itemsize
            target.write(slab.file, offset, place, slab.dtype.itemsize)
        return
    for number, (offset, _) in enumerate(slab.rows()):
        target.write(slab.file, offset, buffer.data_ptr() + number * slab.run, slab.run)


def _singly(slab: Slab) -> Iterator[int]:
    """The offset of each element in the file."""
    for offset, _ in slab.rows():
        for index in range(slab.sizes[-1]):
            yield offset + index * slab.strides[-1] * slab.dtype.itemsize
