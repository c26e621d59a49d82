"""Where a checkpoint goes: a path of this machine, or a URL of any file system that fsspec knows."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Protocol

from composer_dist.checkpoint.storage import local as commit
from composer_dist.checkpoint.storage.retention import checkpoints_in, prune
from composer_dist.errors import CheckpointError, CheckpointRuntimeError, CheckpointValueError
from composer_dist.files.checked import LocalSink, Sink


class Place(Protocol):
    """The place of one checkpoint. The first rank reserves it and finishes; every rank may write files."""

    @property
    def path(self) -> str | os.PathLike[str]:
        """What it is called."""

    def reserve(self, sharded: bool) -> str:
        """Check that a checkpoint may be put here; returns a token of this save."""

    def sink(self, token: str, name: str | None) -> Sink:
        """A new file of the checkpoint; None for the only one."""

    def finish(self, token: str, marks: dict[str, bytes]) -> None:
        """Make what was written the checkpoint that is here.

        Args:
            marks: files that are written last, in this order; empty for a single file.
        """

    def discard(self, token: str) -> None:
        """Remove what was written."""

    def keep(self, count: int) -> None:
        """Remove all but the newest of the checkpoints beside this one, itself included."""


def finish(place: Place, token: str, marks: dict[str, bytes], keep: int | None) -> None:
    """Complete the checkpoint, and remove those that are not kept.

    Raises:
        CheckpointRuntimeError: the file system reports an error: the disk is full, say.
    """
    try:
        place.finish(token, marks)
        if keep is not None:
            place.keep(keep)
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointRuntimeError(
            f"Cannot write {os.fspath(place.path)}: {error.strerror or error}."
        ) from error


def place_of(path: str | os.PathLike[str]) -> Place:
    """The place that a path or URL means; `file://` is a path.

    Raises:
        CheckpointValueError: it is empty.
    """
    text = os.fspath(path)
    if not text:
        raise CheckpointValueError("The path of the checkpoint is empty.")
    if is_remote(text):
        from composer_dist.checkpoint.storage.remote import RemotePlace

        return RemotePlace(text)
    return LocalPlace(local_path(text))


def beside(directory: str) -> list[str]:
    """The complete checkpoints in a directory, newest first."""
    if is_remote(directory):
        from composer_dist.checkpoint.storage.remote import checkpoints_at

        return checkpoints_at(directory)
    return [str(path) for path in checkpoints_in(local_path(directory))]


def is_remote(path: str) -> bool:
    """Whether it is a URL of somewhere else."""
    return "://" in path and not path.startswith("file://")


def local_path(path: str) -> Path:
    """The path that a string means."""
    return Path(os.path.abspath(path.removeprefix("file://")))


class LocalPlace:
    """A path; see `commit` for how it changes."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def path(self) -> Path:
        """What it is called."""
        return self._path

    def reserve(self, sharded: bool) -> str:
        """Check that a checkpoint may be put here; returns a token of this save."""
        token = secrets.token_hex(4)
        commit.reserve(self.path, commit.aside(self.path, token), sharded)
        return token

    def sink(self, token: str, name: str | None) -> Sink:
        """A new file of the checkpoint; None for the only one."""
        aside = commit.aside(self.path, token)
        return LocalSink(aside if name is None else aside / name)

    def finish(self, token: str, marks: dict[str, bytes]) -> None:
        """Write the marks and rename."""
        for name, contents in marks.items():
            sink = self.sink(token, name)
            sink.write(memoryview(contents))
            sink.close()
        commit.put_in_place(commit.aside(self.path, token), self.path)

    def discard(self, token: str) -> None:
        """Remove what was written."""
        commit.discard(commit.aside(self.path, token))

    def keep(self, count: int) -> None:
        """Remove all but the newest of the checkpoints beside this one."""
        prune(self.path, count)
