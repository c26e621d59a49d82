"""Reads slices of files into tensors, in the order of the files, with several threads.

Data with the target's dtype and layout is read directly into the target's memory (`os.preadv`, which lets
other threads run meanwhile). Data that must be cast, rearranged or sent to an accelerator passes through
a staging buffer of fixed size, one per thread. Files are neither memory-mapped nor opened for direct
access, so all ranks of a host share the page cache, and network file systems work too. Files on a
remote file system that fsspec supports are read by their URL in the same way.
"""

import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any, Self
from weakref import finalize

import torch

from composer_dist.errors import CheckpointRuntimeError, CheckpointValueError
from composer_dist.files.index import Entry
from composer_dist.files.slabs import (
    BATCH_BYTES,
    STAGE_BYTES,
    THREADS,
    Buffers,
    Slab,
    lent,
    move_in_threads,
    plan_reads,
)
from composer_dist.progress import Stage
from composer_dist.tensors.blueprint import Blueprint
from composer_dist.tensors.pages import STEP, provide
from composer_dist.tensors.parts import Part

_WORTH = 512
"""Rows of at least this many bytes are read separately; shorter ones with the gaps between them."""
_VECTORS = 1024
"""Most pieces of memory in one read: the kernel's IOV_MAX."""
_MOST_OPEN = 128
"""Files that are open at a time; a process may often open 1024, and on some systems 256."""


class OpenFile:
    """A file of a known size, open until nothing refers to it."""

    def __init__(self, path: Path, size: int) -> None:
        """Open the file and check its size; raises as `Files` does."""
        try:
            self.descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise CheckpointRuntimeError(f"Cannot read {path}: {error.strerror}.") from error
        self.close = finalize(self, os.close, self.descriptor)
        if (here := os.fstat(self.descriptor).st_size) != size:
            self.close()
            raise CheckpointValueError(
                f"{path} has {here} bytes, but {size} are expected: it was truncated or changed, or the "
                "ranks see different files."
            )


class Files:
    """Files of known sizes, of which the last used ones are open; a context manager."""

    def __init__(self, root: Path, sizes: Sequence[tuple[str, int]]) -> None:
        """Open each file and check its size.

        Raises:
            CheckpointRuntimeError: a file does not exist or cannot be opened.
            CheckpointValueError: a file's size differs from the size when its header was read.
        """
        self.paths = [root / name for name, _ in sizes]
        self._sizes = [size for _, size in sizes]
        self._open: dict[int, OpenFile] = {}
        self._lock = Lock()
        try:
            for number in range(len(sizes)):
                self.opened(number)
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._close()

    def opened(self, number: int) -> OpenFile:
        """A file, which stays open for as long as the caller refers to it."""
        found = self._open.get(number)
        if found is None:
            found = OpenFile(self.paths[number], self._sizes[number])
            with self._lock:
                if len(self._open) >= _MOST_OPEN:  # reads are in the order of the files
                    del self._open[next(iter(self._open))]
                self._open[number] = found
        return found

    def _close(self) -> None:
        for file in self._open.values():
            file.close()

    def bytes_of(self, number: int, offset: int, nbytes: int) -> bytes:
        """Some bytes of a file."""
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        self.read(number, offset, [(buffer.data_ptr(), nbytes)])
        return buffer.numpy().tobytes()

    def read(self, number: int, offset: int, memory: Sequence[tuple[int, int]], fresh: bool = False) -> None:
        """Fill pieces of memory, (address, bytes) each, one after the other from one offset in a file.

        Args:
            fresh: the memory may have no pages yet.

        Raises:
            CheckpointRuntimeError: the system reports an error, or the file ends too early.
        """
        path, file, left = self.paths[number], self.opened(number), list(reversed(memory))
        while left:
            address, size = left[-1]
            now = [(address, min(size, STEP))] if fresh and size > STEP else left[::-1]
            for one in now if fresh else ():
                provide(*one)
            views = [(ctypes.c_char * size).from_address(address) for address, size in now]
            try:
                got = os.preadv(file.descriptor, views, offset)
            except OSError as error:
                raise CheckpointRuntimeError(f"Cannot read {path}: {error.strerror}.") from error
            if not got:
                raise CheckpointRuntimeError(f"{path} was truncated while it was read: it ends at {offset}.")
            offset += got
            while left and got >= left[-1][1]:
                got -= left.pop()[1]
            if got:
                address, size = left.pop()
                left.append((address + got, size - got))


@dataclass
class _Batch:
    """One read: a range of a file into one or several pieces of memory, (address, bytes) each."""

    file: int
    offset: int
    nbytes: int
    memory: list[tuple[int, int]]

    def add(self, piece: "_Batch") -> bool:
        """Add a piece with one range if it follows directly in the file and there is room for it."""
        follows = (piece.file, piece.offset) == (self.file, self.offset + self.nbytes)
        if not follows or self.nbytes + piece.nbytes > BATCH_BYTES:
            return False
        ((address, nbytes),) = piece.memory
        if sum(self.memory[-1]) == address:
            self.memory[-1] = (self.memory[-1][0], self.memory[-1][1] + nbytes)
        elif len(self.memory) == _VECTORS:
            return False
        else:
            self.memory.append((address, nbytes))
        self.nbytes += nbytes
        return True


def read_slabs(
    slabs: Sequence[Slab], files: Files, threads: int = THREADS, stage: Stage | None = None
) -> int:
    """Fill the slabs' targets; returns the bytes that were read.

    Args:
        threads: how many read at the same time.
        stage: shows the progress.

    Raises:
        CheckpointRuntimeError: a read fails.
    """
    slabs = sorted(slabs, key=lambda slab: (slab.file, slab.offset))
    staged = [slab for slab in slabs if not _is_direct(slab)]

    def move(piece: _Batch | Slab, buffers: Buffers) -> int:
        if isinstance(piece, _Batch):
            files.read(piece.file, piece.offset, piece.memory, fresh=True)
            return piece.nbytes
        with lent(buffers) as buffer:
            return _read_staged(piece, files, buffer)

    if stage is not None:
        stage.expect(sum(slab.nbytes for slab in slabs))
    return move_in_threads(move, _reads(slabs), staged, "read", stage, threads)


def _reads(slabs: Sequence[Slab]) -> Iterator[_Batch | Slab]:
    """Every read, in the order of the files; adjacent ranges are joined."""
    last: _Batch | Slab | None = None
    for slab in slabs:
        for piece in _direct(slab) if _is_direct(slab) else slab.cut_to(STAGE_BYTES, _staged_bytes):
            if isinstance(piece, _Batch) and isinstance(last, _Batch) and last.add(piece):
                continue
            if last is not None:
                yield last
            last = piece
    if last is not None:
        yield last


def _staged_bytes(slab: Slab) -> int:
    return slab.nbytes if _in_rows(slab) else slab.span


def _is_direct(slab: Slab) -> bool:
    return slab.dtype == slab.target.dtype and slab.target.device.type == "cpu" and _in_rows(slab)


def _in_rows(slab: Slab) -> bool:
    """Whether the slab is read row by row, without the gaps between its elements."""
    return slab.contiguous and (len(slab.sizes) == 1 or slab.run >= _WORTH)


def _direct(slab: Slab) -> Iterator[_Batch]:
    base, item = slab.target.data_ptr(), slab.dtype.itemsize
    for offset, start in slab.rows():
        for at in range(0, slab.run, BATCH_BYTES):
            size = min(BATCH_BYTES, slab.run - at)
            yield _Batch(slab.file, offset + at, size, [(base + start * item + at, size)])


@torch.no_grad()
def _read_staged(slab: Slab, files: Files, buffer: torch.Tensor) -> int:
    """Read a piece into a staging buffer, and copy it from there to the target."""
    base = buffer.data_ptr()
    if _in_rows(slab):
        total, strides = slab.nbytes, [prod(slab.sizes[dim + 1 :]) for dim in range(len(slab.sizes))]
        for number, (offset, _) in enumerate(slab.rows()):
            files.read(slab.file, offset, [(base + number * slab.run, slab.run)])
    else:
        total, strides = slab.span, list(slab.strides)
        files.read(slab.file, slab.offset, [(base, total)])
    source = buffer[:total].view(slab.dtype).as_strided(slab.sizes, strides)
    target = slab.target.as_strided(slab.sizes, slab.steps, slab.target.storage_offset() + slab.start)
    target.copy_(source)
    return total


def open_files(root: Path | str, sizes: Sequence[tuple[str, int]]) -> Files:
    """The files below a directory or a URL; raises as `Files` does."""
    return Files(root, sizes) if isinstance(root, Path) else RemoteFiles(root, sizes)


def file_system(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path there; raises if fsspec does not support it."""
    try:
        import fsspec  # type: ignore[import-untyped]

        system, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise CheckpointValueError(
            f"{url} cannot be reached: {error}. Install fsspec and its file system's package (s3fs, gcsfs)."
        ) from error
    system.invalidate_cache()
    return system, str(path).rstrip("/")


class RemoteFiles(Files):
    """Files of known sizes at a URL; every read is a separate request."""

    def __init__(self, url: str, sizes: Sequence[tuple[str, int]]) -> None:
        self._system, root = file_system(url)
        self._open = {}
        self.paths = [Path(root, name) for name, _ in sizes]
        self._names = [f"{root}/{name}" for name, _ in sizes]
        for name, (_, size) in zip(self._names, sizes, strict=True):
            try:
                here = self._system.size(name)
            except OSError as error:
                raise CheckpointRuntimeError(f"Cannot read {name}: {error}.") from error
            if here != size:
                raise CheckpointValueError(f"{name} has {here} bytes, but was written with {size}.")

    def read(self, number: int, offset: int, memory: Sequence[tuple[int, int]], fresh: bool = False) -> None:
        """See `Files.read`."""
        name, total = self._names[number], sum(size for _, size in memory)
        try:
            data = self._system.cat_file(name, start=offset, end=offset + total)
        except Exception as error:  # every file system has its own
            raise CheckpointRuntimeError(f"Cannot read {name}: {error}.") from error
        if len(data) < total:
            raise CheckpointRuntimeError(
                f"{name} was truncated while it was read: it ends at {offset + len(data)}."
            )
        done = 0
        for address, size in memory:
            ctypes.memmove(address, data[done : done + size], size)
            done += size


def read_values(
    blueprint: Blueprint, entries: Mapping[str, Entry], files: Files, part: Part | None = None
) -> torch.Tensor:
    """A stored tensor: all of it, or the elements of a part of it, flat."""
    whole = Part(blueprint.dims, tuple((0, size) for size in blueprint.dims), 0, prod(blueprint.dims))
    values = torch.empty((part or whole).numel, dtype=blueprint.dtype)
    read_slabs(list(plan_reads(blueprint, entries, part or whole, values)), files)
    return values.view(blueprint.dims) if part is None else values
