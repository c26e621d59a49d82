"""Files whose checksums are computed as they are written; `checksums` verifies them."""

from __future__ import annotations

import os
import pickle
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol, cast

import torch
from torch import Tensor

from composer_dist.errors import CheckpointRuntimeError, CheckpointValueError
from composer_dist.files.manifest import BLOCK, StoredFile

_HEAD = 4096
"""Bytes of an item in which its raw data begin."""

_RECORD = b"archive/data/0"
"""The name under which `torch.save` stores the bytes of a lone tensor."""


class Sink(Protocol):
    """Where bytes go: a local file, or one on a remote file system."""

    def write(self, data: memoryview) -> None:
        """Write all of it."""

    def close(self) -> None:
        """Make sure that it is stored, and let go of it."""

    def abort(self) -> None:
        """Let go of it."""


class LocalSink:
    """A new local file; closing it waits until it is on the disk."""

    def __init__(self, path: Path) -> None:
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileNotFoundError as error:
            raise CheckpointRuntimeError(
                f"{path.parent}, in which a checkpoint is being written, no longer exists: another process "
                "saves to the same place, or empties it. Give every run a separate directory."
            ) from error

    def write(self, data: memoryview) -> None:
        """Write all of it."""
        while data:
            data = data[os.write(self._descriptor, data) :]

    def close(self) -> None:
        """Wait for the disk."""
        try:
            os.fsync(self._descriptor)
        finally:
            self.abort()

    def abort(self) -> None:
        """Close it as it is."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class CheckedFile:
    """A file being written, as `torch.save` wants it; a context manager.

    Args:
        sink: opened already; closed with it.
        name: of the file.
        block: bytes that have one checksum.
        where: what errors call it, if not by its name.
    """

    def __init__(self, sink: Sink, name: str, block: int = BLOCK, where: str = "") -> None:
        self.name = name
        self.where = where or name
        self.nbytes = 0
        self.block = block
        self._sink = sink
        self._checksums: list[int] = []
        self._head = bytearray()
        self._error: Exception | None = None

    def __enter__(self) -> CheckedFile:
        """It is open already."""
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        """Store it, unless something went wrong."""
        if error is not None:
            self._sink.abort()
            return
        with self._named():
            self._sink.close()

    def write(self, data: Any) -> int:
        """Append bytes."""
        view = memoryview(data).cast("B")
        if len(self._head) < _HEAD:
            self._head += view[: _HEAD - len(self._head)]
        rest = view
        try:
            while rest:
                piece = rest[: self.block - self.nbytes % self.block]
                if self.nbytes % self.block == 0:
                    self._checksums.append(0)
                self._checksums[-1] = zlib.crc32(piece, self._checksums[-1])
                self._sink.write(piece)
                self.nbytes += len(piece)
                rest = rest[len(piece) :]
        except Exception as error:  # torch.save would hide it behind one of its own
            self._error = error
            raise
        return len(view)

    def flush(self) -> None:
        """Nothing is held back."""

    def save_tensor(self, values: Tensor) -> tuple[int, int, int]:
        """Append an item that `torch.load` reads as a tensor.

        Returns:
            Where the item begins, where its raw bytes begin, and its length.
        """
        start = self._save(values)
        at = self._head.index(_RECORD)
        extra = int.from_bytes(self._head[at - 2 : at], "little")
        return start, start + at + len(_RECORD) + extra, self.nbytes - start

    def save_object(self, value: Any, through: Any = None) -> tuple[int, int]:
        """Append an item that `torch.load` reads as a value; returns where it begins, and its length.

        Args:
            through: a writer before this one.
        """
        start = self._save(value, through)
        return start, self.nbytes - start

    def append(self, data: bytes) -> None:
        """Write something to which no checksum belongs."""
        with self._named():
            self._sink.write(memoryview(data))

    def stored(self) -> StoredFile:
        """What has been written."""
        return StoredFile(self.name, self.nbytes, tuple(self._checksums), self.block)

    def _save(self, value: Any, through: Any = None) -> int:
        start = self.nbytes
        self._head.clear()
        with self._named():
            torch.save(value, cast(IO[bytes], through or self))
        return start

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Errors of writing say which file, or what cannot be written."""
        try:
            yield
        except Exception as error:
            cause = self._error or error
            if isinstance(cause, OSError):
                raise CheckpointRuntimeError(
                    f"Cannot write {self.where}: {cause.strerror or cause}."
                ) from cause
            if isinstance(cause, (pickle.PicklingError, TypeError, AttributeError)):
                raise CheckpointValueError(
                    f"This cannot be saved, as it cannot be pickled: {cause}."
                ) from cause
            raise
