"""Checkpoints at URLs: S3, other object stores, and all file systems that fsspec supports.

They cannot rename a directory. So each save uses unique names for data files, and writes `checkpoint.json`,
which these systems replace in one step, last. Then it removes the files of the previous checkpoint.
"""

import secrets
from contextlib import suppress
from typing import Any

from composer_dist.checkpoint.storage.local import DAMAGED
from composer_dist.errors import CheckpointError, CheckpointValueError
from composer_dist.files.checked import Sink
from composer_dist.files.checkpoint_format import NAME, Manifest
from composer_dist.files.index import check_size
from composer_dist.files.read import file_system


class RemoteSink:
    """A new file."""

    def __init__(self, system: Any, name: str) -> None:
        self._file = system.open(name, "wb")

    def write(self, data: memoryview) -> None:
        self._file.write(bytes(data))

    def close(self) -> None:
        """Close it; the file system makes it visible."""
        self._file.close()

    def abort(self) -> None:
        """Discard it; `RemotePlace.discard` removes the rest."""
        with suppress(Exception):
            self._file.discard()


class RemotePlace:
    """A `Place` at a URL."""

    def __init__(self, url: str) -> None:
        self.path = url
        self._system, self._root = file_system(url)
        self._parent = self._root.rpartition("/")[0]

    def reserve(self, sharded: bool) -> str:
        if not sharded:
            raise CheckpointValueError(
                f"{self.path} is a URL, from which a single file cannot be loaded. Save sharded, or to a "
                "local file."
            )
        self._system.makedirs(self._root, exist_ok=True)
        return secrets.token_hex(4)

    def sink(self, token: str, name: str | None) -> Sink:
        return RemoteSink(self._system, f"{self._root}/{name}")

    def finish(self, token: str, marks: dict[str, bytes]) -> None:
        """Write the marks, the last of which completes the checkpoint; then remove the previous files."""
        manifest = _manifest(self._system, self._root)
        for name, contents in marks.items():
            self._system.pipe_file(f"{self._root}/{name}", contents)
        for file in manifest.files if manifest else ():
            with suppress(FileNotFoundError):
                self._system.rm(f"{self._root}/{file.name}")

    def discard(self, token: str) -> None:
        with suppress(Exception):
            for name in self._system.ls(self._root, detail=False):
                if name.endswith(f"_{token}.distcp"):
                    self._system.rm(name)

    def read(self, name: str) -> bytes | None:
        try:
            return _read(self._system, f"{self._root}/{name}")
        except FileNotFoundError:
            return None

    def has(self, name: str) -> bool:
        return bool(self._system.exists(f"{self._root}/{name}"))

    def inside(self) -> list[str]:
        return _newest_first(self._system, self._root)

    def incomplete(self) -> list[str]:
        """Directories in this one with data of checkpoints, but without the file that is written last."""
        data = {path.rpartition("/")[0] for path in self._system.glob(f"{self._root}/*/*.distcp")}
        found = [path for path in sorted(data) if not path.endswith(DAMAGED)]
        return [self._url(path) for path in found if _manifest(self._system, path) is None]

    def set_aside(self) -> str:
        """Rename the checkpoint, which is damaged: it is no longer found, replaced or removed."""
        aside = f"{self._root}-{secrets.token_hex(4)}{DAMAGED}"
        self._system.mv(self._root, aside, recursive=True)
        return self._url(aside)

    def probe(self) -> None:
        """Write a file here, in a new directory if need be, and remove it."""
        self._system.makedirs(self._parent, exist_ok=True)
        self._system.pipe_file(self._root, b"-")
        self._system.rm(self._root)

    def _url(self, path: str) -> str:
        return str(self._system.unstrip_protocol(path))

    def beside(self) -> list[str]:
        return _newest_first(self._system, self._parent, but=self._root)

    def remove(self) -> None:
        self._system.rm(f"{self._root}/{NAME}")
        self._system.rm(self._root, recursive=True)


def _newest_first(system: Any, directory: str, but: str = "") -> list[str]:
    found: list[tuple[float, str]] = []
    try:
        paths = [path.rstrip("/") for path in system.ls(directory, detail=False)]
    except FileNotFoundError:
        return []
    for path in paths:
        if path != but and not path.endswith(DAMAGED) and (manifest := _manifest(system, path)) is not None:
            found.append((manifest.facts.get("time", 0.0), path))
    return [system.unstrip_protocol(path) for _, path in sorted(found, reverse=True)]


def _manifest(system: Any, path: str) -> Manifest | None:
    """The manifest of the checkpoint at a path, if there is one."""
    try:
        return Manifest.of_text(_read(system, f"{path}/{NAME}"), path)
    except (OSError, CheckpointError):
        return None


def _read(system: Any, path: str) -> bytes:
    check_size(path, system.size(path) or 0)
    contents: bytes = system.cat_file(path)
    return contents
