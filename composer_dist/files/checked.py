"""Writes files and computes their checksums; `checksums` verifies them."""

from __future__ import annotations

import os
import pickle
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Protocol, cast

import torch
from torch import Tensor

from composer_dist import _torch
from composer_dist.errors import CheckpointRuntimeError, CheckpointValueError
from composer_dist.files.checkpoint_format import BLOCK, StoredFile

_BUFFER = 1 << 16
"""Bytes that are collected before they are written; more at once are written directly."""
_AHEAD = 8 << 20
"""Bytes after which the disk starts to write, while more are computed and copied."""


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
            self._file = open(path, "xb", buffering=_BUFFER)  # noqa: SIM115
        except FileNotFoundError as error:
            raise CheckpointRuntimeError(
                f"{path.parent}, to which a checkpoint is being written, no longer exists: another process "
                "saves to the same place or deletes files there. Give every run a separate directory."
            ) from error
        self._copied = self._begun = 0

    def write(self, data: memoryview) -> None:
        """Write all of it."""
        self._file.write(data)
        self._copied += len(data)
        size = self._copied - self._begun
        if size >= _AHEAD and hasattr(os, "posix_fadvise"):  # Linux starts to write; dirty pages stay
            os.posix_fadvise(self._file.fileno(), self._begun, size, os.POSIX_FADV_DONTNEED)
            self._begun = self._copied

    def close(self) -> None:
        """Wait for the disk."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        finally:
            self.abort()

    def abort(self) -> None:
        """Close it as it is."""
        with suppress(OSError):  # the disk is full, which `write` or `close` has reported
            self._file.close()


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
        self._archives: dict[tuple[torch.dtype, torch.Size], tuple[bytes, bytes]] = {}
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
        """Append a tensor for `torch.load`; returns the offsets of item and raw bytes, and the length.

        Args:
            values: on the CPU, contiguous, alone in its storage.
        """
        start, kind = self.nbytes, (values.dtype, values.shape)
        if kind not in self._archives:
            self._archives[kind] = _torch.archive_around(values)
        head, tail = self._archives[kind]
        raw = torch.empty(0, dtype=torch.uint8).set_(values.untyped_storage())
        with self._named():
            for data in (head, raw.numpy(), tail):
                self.write(data)
        return start, start + len(head), self.nbytes - start

    def save_object(self, value: Any, through: Any = None) -> tuple[int, int]:
        """Append a value for `torch.load`, written via `through`; returns its offset and length."""
        start = self.nbytes
        with self._named():
            torch.save(value, cast(IO[bytes], through or self))
        return start, self.nbytes - start

    def append(self, data: bytes) -> None:
        """Append bytes without a checksum."""
        with self._named():
            self._sink.write(memoryview(data))

    def stored(self) -> StoredFile:
        """The name, size and checksums of the file."""
        return StoredFile(self.name, self.nbytes, tuple(self._checksums), self.block)

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
