"""Ends a process by SIGKILL at one of the calls that change files: before it, or after half of a write."""

import io
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from composer_dist.files import checked

CALLS = [
    "open",
    "mkdir",
    "rmdir",
    "rename",
    "replace",
    "unlink",
    "remove",
    "link",
    "symlink",
    "fsync",
    "close",
]


class Killing:
    """Counts the calls of this process from now on, and ends it at one of them.

    Args:
        at: the number of the call, from 0; what is beyond the last one lets it live.
    """

    def __init__(self, at: int) -> None:
        self.left = at
        for name in CALLS:
            setattr(os, name, self._counted(getattr(os, name)))
        checked.open = self._open  # type: ignore[attr-defined]
        checked._BUFFER = 512

    def call(self) -> None:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1

    def _counted(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.call()
            return usual(*arguments, **options)

        return call

    def _open(self, path: Path, mode: str, buffering: int) -> io.BufferedWriter:
        self.call()
        return io.BufferedWriter(_File(path, mode, self), buffering)


class _File(io.FileIO):
    def __init__(self, path: Path, mode: str, killing: Killing) -> None:
        super().__init__(path, mode.replace("b", ""))
        self._killing = killing

    def write(self, data: Any) -> int:
        self._killing.call()
        if self._killing.left == 0:
            super().write(data[: len(data) // 2])
        self._killing.call()
        return super().write(data)
