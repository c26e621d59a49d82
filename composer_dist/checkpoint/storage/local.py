"""Checkpoints in a local directory, each of which appears in one step.

A checkpoint is written under another name beside its place (`.name.token.tmp`) and renamed when complete.

- A new directory, or a file that replaces a file, needs one rename.
- If a directory exists, the new data files, whose names differ, are moved in beside the old ones. Then
  `checkpoint.json` is replaced, which is one step for the file system. The old files are removed last.
- If a file replaces a directory, or the reverse, or if the place is a link, the old one is first renamed to
  `.name.token.old`. `resolve` finds it there under its own name until the new one is in place.
- A checkpoint that is removed is first renamed to `.name.token.gone`. Of a link to a checkpoint elsewhere,
  only the link is removed.

If the process is killed at any moment, the place has no checkpoint, the old one or the new one.
"""

import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

from composer_dist.errors import CheckpointError, CheckpointIsADirectoryError, CheckpointRuntimeError
from composer_dist.files.checked import LocalSink, Sink
from composer_dist.files.checkpoint_format import DATA_FILE, NAME, START, Manifest, saved_at
from composer_dist.files.index import check_inside, read_text
from composer_dist.files.torch_save import is_sealed

DCP_METADATA = ".metadata"
DAMAGED = ".damaged"
"""The end of the name of a checkpoint that was set aside."""
_MOST_HELD = 256
"""Files to keep open: processes may open a thousand."""
_ASIDE = re.compile(r"\.(.+)\.[0-9a-f]{8}\.(tmp|old|gone)")
"""Names of files and directories that are written, or kept, beside their place."""


@dataclass(frozen=True)
class LocalPlace:
    """A `Place` in the local file system."""

    path: Path

    def reserve(self, sharded: bool) -> str:
        """Check that a checkpoint may be put here and remove what earlier saves left unfinished.

        Raises:
            CheckpointIsADirectoryError: a single file was asked for, but the path is another directory.
        """
        path = self.path
        if not sharded and path.is_dir() and not is_checkpoint(path):
            raise CheckpointIsADirectoryError(
                f"{path} is a directory, but not a checkpoint that a file could replace; give a file name in "
                "it, or save sharded."
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        clear_unfinished(path)
        for left in _removed(path.parent):
            _remove(left)
        token = secrets.token_hex(4)
        if sharded:
            self._aside(token).mkdir()
        return token

    def sink(self, token: str, name: str | None) -> Sink:
        aside = self._aside(token)
        return LocalSink(aside if name is None else aside / name)

    def finish(self, token: str, marks: dict[str, bytes]) -> None:
        for name, contents in marks.items():
            sink = self.sink(token, name)
            sink.write(memoryview(contents))
            sink.close()
        put_in_place(self._aside(token), self.path)

    def discard(self, token: str) -> None:
        with suppress(OSError, CheckpointError):
            _remove(self._aside(token))

    def read(self, name: str) -> bytes | None:
        with suppress(FileNotFoundError):
            return read_text(self.path / name)
        return None

    def has(self, name: str) -> bool:
        return (self.path / name).is_file()

    def inside(self) -> list[str]:
        return [str(path) for path in _newest_first(self.path)]

    def incomplete(self) -> list[str]:
        """Directories in this one with data of checkpoints, but without the file that is written last."""
        data = {path.parent for path in self.path.glob("[!.]*/*.distcp")}
        return [str(one) for one in sorted(data) if not is_checkpoint(one) and one.suffix != DAMAGED]

    def set_aside(self) -> str:
        """Rename the checkpoint, which is damaged: it is no longer found, replaced or removed."""
        aside, number = self.path.with_name(f"{self.path.name}{DAMAGED}"), 1
        while aside.exists():
            number += 1
            aside = self.path.with_name(f"{self.path.name}-{number}{DAMAGED}")
        resolve(self.path).rename(aside)
        return str(aside)

    def probe(self) -> None:
        """Write a file here, in a new directory if need be, and remove it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self.path.parent) as file:
            file.write(b"-")

    def beside(self) -> list[str]:
        return [str(path) for path in _newest_first(self.path.parent) if path != self.path]

    def remove(self) -> None:
        """Remove the checkpoint; it is gone in one step, and the next save removes what a kill leaves."""
        gone = _named_aside(self.path, secrets.token_hex(4), "gone")
        resolve(self.path).rename(gone)
        _remove(gone)

    def _aside(self, token: str) -> Path:
        return _named_aside(self.path, token, "tmp")


def unfinished(folder: Path) -> list[str]:
    """The names of checkpoints in a folder that saves in progress, or killed ones, were writing."""
    return sorted({match[1] for name in os.listdir(folder) if (match := _ASIDE.fullmatch(name))})


def clear_unfinished(path: Path) -> None:
    """Remove what saves to a path left unfinished; a checkpoint that one was replacing is put back."""
    for old in _beside(path, "old"):
        if path.exists():
            _remove(old)
        else:
            old.rename(path)
    for left in _beside(path, "tmp"):
        _remove(left)


def resolve(path: Path) -> Path:
    """The actual path of a checkpoint, which is another one if a save was killed while replacing it."""
    return path if path.exists() else next(_beside(path, "old"), path)


def is_checkpoint(path: Path) -> bool:
    """Whether a path is a complete checkpoint of this library, judged by its mark."""
    return (path / NAME).is_file() if path.is_dir() else path.is_file() and is_sealed(path)


def put_in_place(aside: Path, path: Path) -> None:
    """Move a checkpoint from `aside` to `path`; all of its files are on the disk already."""
    if aside.is_dir():
        _sync(aside)
    if aside.is_dir() and path.is_dir() and not path.is_symlink():
        _replace_contents(aside, path)
    elif path.is_symlink() or (path.exists() and aside.is_dir() != path.is_dir()):
        old = _named_aside(path, secrets.token_hex(4), "old")
        path.rename(old)
        aside.rename(path)
        _sync(path.parent)
        _remove(old)
    else:
        os.replace(aside, path)
    _sync(path.parent)


def _replace_contents(aside: Path, path: Path) -> None:
    """Move a new checkpoint into the directory of an old one, and replace that by moving the mark."""
    before = _files_of(path)
    last = [DCP_METADATA, NAME]
    new = sorted((file.name for file in aside.iterdir()), key=lambda name: (name in last, name == NAME))
    for name in new:
        if name == NAME:
            _sync(path)
        os.replace(aside / name, path / name)
    _sync(path)
    _unlink(path / name for name in before.difference(new))
    os.rmdir(aside)


def _files_of(path: Path) -> set[str]:
    """The files of the checkpoint in a directory, and files that a killed save has moved there."""
    left = {file.name for file in path.iterdir() if DATA_FILE.fullmatch(file.name)}
    try:
        check_inside(path, [NAME])
        manifest = Manifest.of_text(read_text(path / NAME), str(path / NAME))
    except (OSError, CheckpointError):
        return left
    return left.union(file.name for file in manifest.files)


def _newest_first(directory: Path) -> list[Path]:
    """Complete checkpoints in a directory, by the time of saving, newest first."""
    try:
        names = set(os.listdir(directory))
    except FileNotFoundError:
        return []
    names |= {match[1] for name in names if (match := _ASIDE.fullmatch(name)) and match[2] == "old"}
    found: list[tuple[float, str, Path]] = []
    for name in names:
        path = resolve(directory / name)
        if name.startswith(".") or path.suffix == DAMAGED or _leads_beside(path) or not is_checkpoint(path):
            continue
        with suppress(FileNotFoundError):  # removed meanwhile
            found.append((_time_of(path), name, directory / name))
    return [path for _, _, path in sorted(found, reverse=True)]


def _leads_beside(path: Path) -> bool:
    """Whether it is a link to something in its own directory, such as `latest`."""
    if not path.is_symlink():
        return False
    target = path.parent / os.readlink(path)
    return os.path.realpath(target.parent) == os.path.realpath(path.parent)


def _time_of(path: Path) -> float:
    """When a checkpoint was saved: by its manifest, because a copy has the time of copying."""
    mark, start = path, b""
    if path.is_dir():
        mark = path / NAME
        with suppress(OSError), mark.open("rb") as file:
            start = file.read(START)
    time = saved_at(start)
    return mark.stat().st_mtime if time is None else time


def _named_aside(path: Path, token: str, purpose: str) -> Path:
    return path.parent / f".{path.name}.{token}.{purpose}"


def _beside(path: Path, purpose: str) -> Iterator[Path]:
    """The paths beside a path that have some purpose."""
    with suppress(OSError):
        for name in sorted(os.listdir(path.parent)):
            if (match := _ASIDE.fullmatch(name)) and match.groups() == (path.name, purpose):
                yield path.parent / name


def _removed(directory: Path) -> list[Path]:
    """What is left in a directory of checkpoints that were being removed."""
    found = [(name, _ASIDE.fullmatch(name)) for name in os.listdir(directory)]
    return [directory / name for name, match in found if match and match[2] == "gone"]


def _sync(directory: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unlink(paths: Iterable[Path]) -> Thread:
    """Remove the names of files now; returns a thread that frees their blocks by closing them.

    It takes about as long as writing them did, and all ranks would wait.
    """
    held: list[int] = []
    for path in paths:
        if len(held) < _MOST_HELD:
            with suppress(OSError):
                held.append(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW))
        with suppress(FileNotFoundError, IsADirectoryError):
            os.unlink(path)

    def close() -> None:
        for one in held:
            os.close(one)

    closing = Thread(target=close, name="composer_dist-free")
    closing.start()
    return closing


def _remove(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            closing = _unlink(path.iterdir())
            try:
                shutil.rmtree(path)
            except OSError:  # NFS keeps names of open files
                closing.join()
                shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise CheckpointRuntimeError(f"Cannot remove {path}: {error.strerror}.") from error
