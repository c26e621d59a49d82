"""Files on a remote file system, read as local ones are: any that fsspec knows, by its URL."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from composer_dist.distributed.reading import Files
from composer_dist.errors import CheckpointRuntimeError, CheckpointValueError


def open_files(root: Path | str, sizes: Sequence[tuple[str, int]]) -> Files:
    """The files below a directory, or a URL.

    Raises:
        CheckpointRuntimeError: one is not there, or cannot be opened.
        CheckpointValueError: one has another size than it should.
    """
    return Files(root, sizes) if isinstance(root, Path) else RemoteFiles(root, sizes)


def file_system(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path there.

    Raises:
        CheckpointValueError: fsspec is not installed, or knows no such file system.
    """
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
    """Files of known sizes; every read is a request of its own."""

    def __init__(self, url: str, sizes: Sequence[tuple[str, int]]) -> None:
        """See `Files`."""
        self._system, root = file_system(url)
        self._stack = ExitStack()
        self.paths = [Path(root, name) for name, _ in sizes]
        self._names = [f"{root}/{name}" for name, _ in sizes]
        for name, (_, size) in zip(self._names, sizes, strict=True):
            try:
                here = self._system.size(name)
            except OSError as error:
                raise CheckpointRuntimeError(f"Cannot read {name}: {error}.") from error
            if here != size:
                raise CheckpointValueError(f"{name} has {here} bytes, but was written with {size}.")

    def read(self, number: int, offset: int, memory: Sequence[tuple[int, int]]) -> None:
        """See `Files.read`."""
        name, total = self._names[number], sum(size for _, size in memory)
        try:
            data = self._system.cat_file(name, start=offset, end=offset + total)
        except Exception as error:  # every file system has its own
            raise CheckpointRuntimeError(f"Cannot read {name}: {error}.") from error
        if len(data) < total:
            raise CheckpointRuntimeError(f"{name} has become shorter; it ended at {offset + len(data)}.")
        for address, size in memory:
            ctypes.memmove(address, data[:size], size)
            data = data[size:]
