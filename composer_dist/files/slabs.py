"""Maps byte ranges of files to a rank's part of a tensor, and moves them with several threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from queue import SimpleQueue
from typing import Protocol, TypeVar

import torch

from composer_dist.files.index import Entry
from composer_dist.progress import Stage
from composer_dist.tensors.blueprint import Blueprint, Box, reshape
from composer_dist.tensors.parts import Dims, Part, contiguous_strides, rectangles


@dataclass(frozen=True)
class Slab:
    """A rectangle of stored elements, and the elements of a target that correspond to them."""

    file: int
    offset: int
    """Of the first element in the file, in bytes."""
    dtype: torch.dtype
    """As stored."""
    sizes: Dims
    strides: Dims
    """Between elements in the file, in elements."""
    target: torch.Tensor
    """Contiguous; of any dtype, on any device."""
    start: int
    """Number of the first element in the target, in row-major order."""
    steps: Dims
    """Between elements in the target."""

    @property
    def contiguous(self) -> bool:
        """Whether elements of the last dimension follow each other, in the file and in the target."""
        return self.strides[-1] == self.steps[-1] == 1 or self.sizes[-1] == 1

    @property
    def run(self) -> int:
        """Bytes of one row of the last dimension."""
        return self.sizes[-1] * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements, as stored."""
        return prod(self.sizes) * self.dtype.itemsize

    @property
    def span(self) -> int:
        """Bytes from the first element in the file to the end of the last."""
        last = sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))
        return (last + 1) * self.dtype.itemsize

    def rows(self) -> Iterator[tuple[int, int]]:
        """The offset of each row of the last dimension: bytes in the file, elements in the target."""
        for at in itertools.product(*map(range, self.sizes[:-1])):
            stored = sum(index * stride for index, stride in zip(at, self.strides, strict=False))
            place = sum(index * step for index, step in zip(at, self.steps, strict=False))
            yield self.offset + stored * self.dtype.itemsize, self.start + place

    def cut(self, dim: int, length: int) -> Iterator[Slab]:
        """The slab in pieces of at most `length` indices in a dimension."""
        for at in range(0, self.sizes[dim], length):
            size = min(length, self.sizes[dim] - at)
            yield replace(
                self,
                offset=self.offset + at * self.strides[dim] * self.dtype.itemsize,
                start=self.start + at * self.steps[dim],
                sizes=(*self.sizes[:dim], size, *self.sizes[dim + 1 :]),
            )

    def cut_to(self, limit: int, size_of: Callable[[Slab], int]) -> Iterator[Slab]:
        """The slab in pieces of at most `limit` bytes by `size_of`."""
        if (size := size_of(self)) <= limit:
            yield self
            return
        dims = [dim for dim, count in enumerate(self.sizes) if count > 1]
        dim = max(dims, key=lambda dim: self.strides[dim] * self.sizes[dim])
        for piece in self.cut(dim, max(1, self.sizes[dim] * limit // (size + limit))):
            yield from piece.cut_to(limit, size_of)


def plan_reads(
    blueprint: Blueprint,
    entries: Mapping[str, Entry],
    part: Part,
    target: torch.Tensor,
    first: int = 0,
    last: int | None = None,
) -> Iterator[Slab]:
    """The slabs of a part of the tensor that `blueprint` describes.

    Args:
        entries: the stored tensors.
        part: the part that the target holds.
        target: contiguous, of the part's elements.
        first: the first element of the part to read.
        last: the one after the last; None means the part's end.
    """
    boxes = reshape(blueprint.boxes, blueprint.dims, part.shape)
    lows = tuple(low for low, _ in part.window)
    sizes = tuple(high - low for low, high in part.window)
    steps = contiguous_strides(sizes)
    stop = part.first + (part.numel if last is None else last)
    for corner, extent in rectangles(sizes, part.first + first, stop):
        for box in boxes:
            piece: Box | None = box
            for dim, (low, at, size) in enumerate(zip(lows, corner, extent, strict=True)):
                piece = piece and piece.narrow(dim, low + at, low + at + size)
            if piece is None:
                continue
            entry = entries[piece.source]
            offset = entry.offset + piece.offset * entry.dtype.itemsize
            places = zip(piece.start, lows, steps, strict=True)
            start = sum((at - low) * step for at, low, step in places) - part.first
            fewer, strides, jumps = _simplified(piece.sizes, piece.strides, steps)
            yield Slab(entry.file, offset, entry.dtype, fewer, strides, target, start, jumps)


def _simplified(sizes: Dims, strides: Dims, steps: Dims) -> tuple[Dims, Dims, Dims]:
    """The same elements in the same order with the fewest dimensions, at least one."""
    found: list[tuple[int, int, int]] = []
    for size, stride, step in zip(sizes, strides, steps, strict=True):
        if size == 1:
            continue
        if found and found[-1][1] == size * stride and found[-1][2] == size * step:
            found[-1] = (found[-1][0] * size, stride, step)
        else:
            found.append((size, stride, step))
    fewer, jumps, moves = zip(*(found or [(1, 1, 1)]), strict=True)
    return fewer, jumps, moves


MIB = 1 << 20
THREADS = 4
"""May exceed the number of cores, because over a network threads mostly wait."""
STAGE_BYTES = 3 * MIB
"""Size of a staging buffer, and of a piece that needs one."""
BATCH_BYTES = 16 * MIB
"""Size of a batch of pieces, and of a piece that needs no staging."""


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


Piece = TypeVar("Piece", bound=_Sized)
Task = TypeVar("Task")
Result = TypeVar("Result")
Buffer = TypeVar("Buffer")
Buffers = SimpleQueue[torch.Tensor]


def move_in_threads(
    move: Callable[[Piece, Buffers], int],
    pieces: Iterable[Piece],
    staged: Sequence[Slab],
    purpose: str,
    stage: Stage | None = None,
    threads: int = THREADS,
) -> int:
    """Move pieces of data, in batches of about `BATCH_BYTES`; returns the bytes that were moved.

    Args:
        move: moves a piece, with one of the staging buffers if it needs one; returns its bytes.
        staged: the slabs that need staging buffers; these are pinned for accelerators.
        purpose: the name of the threads.
        stage: shows the progress.
        threads: the number of threads, each with a buffer of `STAGE_BYTES`.
    """
    buffers: Buffers = SimpleQueue()
    pin = any(slab.target.device.type != "cpu" for slab in staged)
    for _ in range(threads if staged else 0):
        buffers.put(torch.empty(STAGE_BYTES, dtype=torch.uint8, device="cpu", pin_memory=pin))

    def work(batch: list[Piece]) -> int:
        total = 0
        for piece in batch:
            total += move(piece, buffers)
            if stage is not None:
                stage.advance(piece.nbytes)
        return total

    return sum(in_threads(work, _batches(pieces), purpose, threads))


@contextmanager
def lent(buffers: SimpleQueue[Buffer]) -> Iterator[Buffer]:
    """One of the buffers. It returns after an error too; other tasks that have begun would wait forever."""
    buffer = buffers.get()
    try:
        yield buffer
    finally:
        buffers.put(buffer)


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += piece.nbytes
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def in_threads(
    work: Callable[[Task], Result], tasks: Iterable[Task], purpose: str, threads: int = THREADS
) -> list[Result]:
    """The results of `work` for all tasks; the first error cancels the tasks that have not started."""
    with ThreadPoolExecutor(threads, thread_name_prefix=f"composer_dist-{purpose}") as pool:
        futures = [pool.submit(work, task) for task in tasks]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            pool.shutdown(cancel_futures=True)  # after an error or Ctrl-C, do not run the rest
        failed = [future for future in futures if not future.cancelled() and future.exception()]
        return [future.result() for future in failed or futures]
