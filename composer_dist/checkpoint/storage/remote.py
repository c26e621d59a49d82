"""Checkpoints at URLs: object stores and other file systems that fsspec knows.

They cannot rename a directory. So data files have names that no other save has, and `checkpoint.json`,
which these systems put in place all at once, is written last. What belonged to the checkpoint before is
removed after that.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from typing import Any

from composer_dist.errors import CheckpointError, CheckpointIsADirectoryError
from composer_dist.files.checked import Sink
from composer_dist.files.manifest import NAME, Manifest
from composer_dist.files.read import file_system


class RemoteSink:
    """A new file."""

    def __init__(self, system: Any, name: str) -> None:
        self._file = system.open(name, "wb")

    def write(self, data: memoryview) -> None:
        """Write all of it."""
        self._file.write(bytes(data))

    def close(self) -> None:
        """The file system makes it visible."""
        self._file.close()

    def abort(self) -> None:
        """Let go of it; what is there goes with the rest."""
        with suppress(Exception):
            self._file.discard()


class RemotePlace:
    """A URL."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._system, self._root = file_system(url)

    @property
    def path(self) -> str:
        """What it is called."""
        return self._url

    def reserve(self, sharded: bool) -> str:
        """Check that a checkpoint may be put here; returns a token of this save."""
        if not sharded and self._system.isdir(self._root) and not self._is_checkpoint(self._root):
            raise CheckpointIsADirectoryError(
                f"{self.path} is a directory, and not a checkpoint; give a file name in it, or save sharded."
            )
        self._system.makedirs(self._root if sharded else self._parent(), exist_ok=True)
        return secrets.token_hex(4)

    def sink(self, token: str, name: str | None) -> Sink:
        """A new file of the checkpoint; None for the only one."""
        return RemoteSink(self._system, self._aside(token) if name is None else f"{self._root}/{name}")

    def finish(self, token: str, marks: dict[str, bytes]) -> None:
        """Write the marks, the last of which counts; then remove what was there before."""
        before = self._files()
        if not marks:
            if self._system.isdir(self._root):
                self._system.rm(self._root, recursive=True)
            self._system.mv(self._aside(token), self._root)
            return
        for name, contents in marks.items():
            self._system.pipe_file(f"{self._root}/{name}", contents)
        for name in before:
            with suppress(FileNotFoundError):
                self._system.rm(f"{self._root}/{name}")

    def discard(self, token: str) -> None:
        """Remove what was written."""
        with suppress(Exception):
            self._system.rm(self._aside(token))
        with suppress(Exception):
            for name in self._system.ls(self._root, detail=False):
                if name.endswith(f"_{token}.distcp"):
                    self._system.rm(name)

    def keep(self, count: int) -> None:
        """Remove all but the newest of the checkpoints beside this one."""
        own = f"{self._root}"
        others = [path for path in _newest_first(self._system, self._parent()) if path != own]
        for path in others[max(count - 1, 0) :]:
            self._system.rm(f"{path}/{NAME}")
            self._system.rm(path, recursive=True)

    def _parent(self) -> str:
        return self._root.rpartition("/")[0]

    def _aside(self, token: str) -> str:
        return f"{self._parent()}/.{self._root.rpartition('/')[2]}.{token}.tmp"

    def _is_checkpoint(self, path: str) -> bool:
        return bool(self._system.exists(f"{path}/{NAME}"))

    def _files(self) -> list[str]:
        manifest = _manifest(self._system, self._root)
        return [] if manifest is None else [file.name for file in manifest.files]


def checkpoints_at(url: str) -> list[str]:
    """URLs of the complete sharded checkpoints below one, newest first."""
    system, root = file_system(url)
    return [system.unstrip_protocol(path) for path in _newest_first(system, root)]


def _newest_first(system: Any, directory: str) -> list[str]:
    found: list[tuple[float, str]] = []
    try:
        paths = system.ls(directory, detail=False)
    except FileNotFoundError:
        return []
    for path in paths:
        manifest = _manifest(system, path.rstrip("/"))
        if manifest is not None:
            found.append((manifest.facts.get("time", 0.0), path.rstrip("/")))
    return [path for _, path in sorted(found, reverse=True)]


def _manifest(system: Any, path: str) -> Manifest | None:
    """What a checkpoint says about itself, if one is there."""
    try:
        return Manifest.of_text(system.cat_file(f"{path}/{NAME}"), path)
    except (OSError, CheckpointError):
        return None
