"""Which checkpoints are there, the newest first, and which of them stay."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from composer_dist.checkpoint.storage.local import is_checkpoint
from composer_dist.files.manifest import NAME


def checkpoints_in(directory: Path) -> list[Path]:
    """Complete checkpoints of ours in a directory, by the time at which they were completed, newest first."""
    found: list[tuple[int, str, Path]] = []
    try:
        paths = sorted(directory.iterdir())
    except FileNotFoundError:
        return []
    for path in paths:
        if path.name.startswith(".") or path.is_symlink() or not is_checkpoint(path):
            continue
        with suppress(FileNotFoundError):  # removed meanwhile
            mark = path / NAME if path.is_dir() else path
            found.append((mark.stat().st_mtime_ns, path.name, path))
    return [path for _, _, path in sorted(found, reverse=True)]


def prune(path: Path, count: int) -> None:
    """Remove all checkpoints beside `path` but the newest, of which `path` is one."""
    others = [other for other in checkpoints_in(path.parent) if other != path]
    for old in others[max(count - 1, 0) :]:
        remove(old)


def remove(path: Path) -> None:
    """Remove a checkpoint, its mark first, so that half of it is never taken for one."""
    if path.is_dir():
        (path / NAME).unlink()
        shutil.rmtree(path)
    else:
        os.unlink(path)
