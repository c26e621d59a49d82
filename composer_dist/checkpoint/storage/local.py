"""How a checkpoint comes to be all at once: written aside, then put in place by one step.

A new directory is written under another name beside its place and renamed. Over a checkpoint that is there,
the new data files, whose names differ, are moved in beside the old ones; then `checkpoint.json` is replaced,
which is one step for the file system, and only then the old data go. Whenever the process dies, the place
holds nothing, or the old checkpoint, or the new one. A file replaces a file in the same way. Where a file and
a directory change places, the two names are exchanged by the kernel; on a file system that cannot, the old
one is kept under another name meanwhile, where `resolve` finds it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from composer_dist.errors import CheckpointError, CheckpointIsADirectoryError, CheckpointRuntimeError
from composer_dist.files.manifest import NAME, Manifest
from composer_dist.files.torch_save import is_sealed

_ASIDE, _OLD = "tmp", "old"


DCP_METADATA = ".metadata"


_DATA = re.compile(r"__\d+_[0-9a-f]{8}\.distcp")
"""Names of data files; the end is the token of one save."""


_EXCHANGE, _CWD = 2, -100


def resolve(path: Path) -> Path:
    """Where the checkpoint of this name is: there, or still aside, if a save ended in between."""
    if not path.exists():
        for old in _siblings(path, _OLD):
            return old
    return path


def is_checkpoint(path: Path) -> bool:
    """Whether a complete checkpoint of ours lies there, judged by its mark."""
    return (path / NAME).is_file() if path.is_dir() else path.is_file() and is_sealed(path)


def aside(path: Path, token: str) -> Path:
    """Where a checkpoint is written before it is put in its place."""
    return path.parent / f".{path.name}.{token}.{_ASIDE}"


def reserve(path: Path, aside: Path, sharded: bool) -> None:
    """Check that a checkpoint may be put at a place, and make room to write it aside.

    What earlier saves to this place have left there unfinished is removed.

    Raises:
        CheckpointIsADirectoryError: a single file was asked for where there is a directory of other things.
    """
    if not sharded and path.is_dir() and not is_checkpoint(path):
        raise CheckpointIsADirectoryError(
            f"{path} is a directory, and not a checkpoint that could be replaced by a file; give a file name "
            "in it, or save sharded."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    for old in _siblings(path, _OLD):
        if path.exists():
            _remove(old)
        else:
            old.rename(path)
    for left in _siblings(path, _ASIDE):
        _remove(left)
    if sharded:
        aside.mkdir()


def put_in_place(aside: Path, path: Path) -> None:
    """Make what was written under `aside`, every file of it on the disk already, the checkpoint `path`."""
    if aside.is_dir():
        sync_directory(aside)
    if aside.is_dir() and path.is_dir():
        _replace_contents(aside, path)
    elif aside.is_dir() != path.is_dir() and path.exists():
        _exchange(aside, path)
    else:
        os.replace(aside, path)
    sync_directory(path.parent)


def discard(aside: Path) -> None:
    """Remove what was written, as far as possible."""
    with suppress(OSError):
        _remove(aside)


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace_contents(aside: Path, path: Path) -> None:
    """Move a new checkpoint into the directory of an old one, in whose place it is once its mark is there."""
    before = _files_of(path)
    last = [DCP_METADATA, NAME]
    new = sorted((file.name for file in aside.iterdir()), key=lambda name: (name in last, name == NAME))
    for name in new:
        if name == NAME:
            sync_directory(path)
        os.replace(aside / name, path / name)
    sync_directory(path)
    for name in before.difference(new):
        with suppress(FileNotFoundError):
            os.unlink(path / name)
    os.rmdir(aside)


def _files_of(path: Path) -> set[str]:
    """The files of the checkpoint in a directory, and what a save that was killed has moved in there."""
    left = {file.name for file in path.iterdir() if _DATA.fullmatch(file.name)}
    try:
        manifest = Manifest.of_text((path / NAME).read_bytes(), str(path / NAME))
    except (OSError, CheckpointError):
        return left
    return left.union(file.name for file in manifest.files)


def _exchange(aside: Path, path: Path) -> None:
    """Put a file in the place of a directory, or the reverse."""
    libc = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(aside), os.fsencode(path)
    try:
        done = libc.renameat2(_CWD, names[0], _CWD, names[1], _EXCHANGE) == 0
    except AttributeError:  # not Linux, or an old C library
        done = False
    if done:
        _remove(aside)
        return
    old = path.parent / f".{path.name}.{secrets.token_hex(4)}.{_OLD}"
    path.rename(old)
    aside.rename(path)
    sync_directory(path.parent)
    _remove(old)


def _siblings(path: Path, kind: str) -> Iterator[Path]:
    """What is called after `path` and put aside for some purpose."""
    try:
        names = sorted(os.listdir(path.parent))
    except OSError:
        return
    for name in names:
        middle = name.removeprefix(f".{path.name}.").removesuffix(f".{kind}")
        if name == f".{path.name}.{middle}.{kind}" and len(middle) == 8:
            yield path.parent / name


def _remove(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise CheckpointRuntimeError(f"Cannot remove {path}: {error.strerror}.") from error
