"""What ends this process if its Python threads cannot run: faulthandler writes stacks, a watcher kills."""

import faulthandler
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

import psutil

from composer_dist.distributed.ranks.hangs import watcher

_LATER = 30.0
"""Seconds that the watcher waits longer than faulthandler, in which other ranks look at the stacks."""


class Beside:
    """A watcher process and a dump; `keep` tells both that the thread that calls it runs.

    `faulthandler.dump_traceback_later` is theirs meanwhile. Without memfd_create (man 2), as on macOS, there
    is no dump.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("composer_dist-stacks") if hasattr(os, "memfd_create") else None
        self.dump = "" if self._file is None else f"/proc/{os.getpid()}/fd/{self._file}"
        """Where other processes of this host find the stacks."""
        command = [sys.executable, "-I", "-S", str(watcher.__file__), str(os.getpid()), self.dump]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def keep(self, limit: float) -> None:
        """Expect the next call within `limit` seconds, or at any time if that is infinity."""
        self._tell(f"{limit + _LATER}")
        if self._file is None:
            return
        faulthandler.cancel_dump_traceback_later()
        os.truncate(self._file, 0)
        os.lseek(self._file, 0, os.SEEK_SET)
        if limit < math.inf:
            with suppress(RuntimeError):  # no memory for its thread
                faulthandler.dump_traceback_later(limit, file=self._file)

    def doom(self, processes: Sequence[int]) -> None:
        """Have processes of this host, and those that they have started, killed after the end of this one."""
        found: list[int] = []
        for one in processes:
            with suppress(psutil.Error):
                found += [*(child.pid for child in psutil.Process(one).children(recursive=True)), one]
        if found:
            self._tell(f"kill {' '.join(map(str, found))}")

    def close(self) -> None:
        """End both."""
        if self._file is not None:
            faulthandler.cancel_dump_traceback_later()
            os.close(self._file)
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            os.write(self._process.stdin.fileno(), f"{line}\n".encode())
