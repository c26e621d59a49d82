"""Ctrl-C: the first one lets a run close what is open, the second one ends it at once."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any, Self

EXIT_STATUS = 128 + signal.SIGINT
"""130, what a shell says of a process that Ctrl-C ended."""


TOLD = (
    "\ncomposer-dist train: Ctrl-C. The run ends; once more ends it at once. The same command goes on from "
    "its newest checkpoint, or else begins anew.\n"
)


class CtrlC:
    """Inside, the first SIGINT raises KeyboardInterrupt, and a second one ends the process without Python.

    Where SIGINT is ignored, as in what a shell's script starts with "&", it stays so.

    Args:
        quiet: say nothing: another process does.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._before: Any = None
        self.received = False
        """Then whatever fails, fails because of it: peers that have ended, connections that are closed."""

    def __enter__(self) -> Self:
        main = threading.current_thread() is threading.main_thread()  # others cannot
        if main and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            self._before = signal.signal(signal.SIGINT, self._first)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._before is not None and not self.received:
            signal.signal(signal.SIGINT, self._before)

    def _first(self, number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        self.received = True
        if not self._quiet:
            tell()
        raise KeyboardInterrupt


def tell() -> None:
    """Says so, past Python's buffers: one of them may be what was interrupted."""
    os.write(2, TOLD.encode())
