"""Writes files and computes their checksums; `checksums` verifies them."""

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
from composer_dist.files.checkpoint_format import BLOCK, StoredFile

_HEAD = 4096
"""The raw data of an item begin within this many bytes."""
_RECORD = b"archive/data/0"
"""The name under which `torch.save` stores the bytes of a lone tensor."""


class Sink(Protocol):
    """A local or remote file to write to."""

    def write(self, data: memoryview) -> None:
        """Write all of it."""

    def close(self) -> None:
        """Make sure that everything is stored, and close the file."""

    def abort(self) -> None:
        """Close the file as it is."""


class LocalSink:
    """A new local file; closing it waits until it is on the disk."""

    def __init__(self, path: Path) -> None:
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileNotFoundError as error:
            raise CheckpointRuntimeError(
                f"{path.parent}, to which a checkpoint is being written, no longer exists: another process "
                "saves to the same place or deletes files there. Give every run a separate directory."
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
    """A file that `torch.save` can write to; a context manager that closes the sink.

    Args:
        sink: an open sink.
        name: the name of the file.
        block: bytes per checksum.
        where: the name of the file in errors, by default `name`.
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
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
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
        except Exception as error:  # torch.save would replace it with its own
            self._error = error
            raise
        return len(view)

    def flush(self) -> None:
        """Do nothing: `write` does not buffer."""

    def save_tensor(self, values: Tensor) -> tuple[int, int, int]:
        """Append a tensor for `torch.load`; returns the offsets of item and raw bytes, and the length."""
        start = self._save(values)
        at = self._head.index(_RECORD)
        extra = int.from_bytes(self._head[at - 2 : at], "little")
        return start, start + at + len(_RECORD) + extra, self.nbytes - start

    def save_object(self, value: Any, through: Any = None) -> tuple[int, int]:
        """Append a value for `torch.load`, written via `through`; returns its offset and length."""
        start = self._save(value, through)
        return start, self.nbytes - start

    def append(self, data: bytes) -> None:
        """Append bytes without a checksum."""
        with self._named():
            self._sink.write(memoryview(data))

    def stored(self) -> StoredFile:
        """The name, size and checksums of the file."""
        return StoredFile(self.name, self.nbytes, tuple(self._checksums), self.block)

    def _save(self, value: Any, through: Any = None) -> int:
        start = self.nbytes
        self._head.clear()
        with self._named():
            torch.save(value, cast(IO[bytes], through or self))
        return start

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Make errors name the file, or the value that cannot be written."""
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
                    f"A value cannot be saved because it cannot be pickled: {cause}."
                ) from cause
            raise
