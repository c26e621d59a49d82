"""Ctrl-C: the first lets a run close what is open, the second one quits at once."""

import os
import signal
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, Self

EXIT_STATUS = 128 + signal.SIGINT
"""130, the status that a shell reports for a process that Ctrl-C ended."""
TOLD = (
    "\ncomposer-dist train: interrupted, stopping (Ctrl-C again to force). Run the same command to resume "
    "from the latest checkpoint, if there is one.\n"
)


class CtrlC:
    """Inside, the first SIGINT ends the process or raises KeyboardInterrupt, and a second one kills it.

    If SIGINT is ignored, as in a command that a shell script starts with "&", it stays ignored.

    Args:
        quiet: print nothing, because another process does.
        command: what is running, for the text.
    """

    def __init__(self, quiet: bool = False, command: str = "train") -> None:
        self._quiet, self._command = quiet, command
        self.at_once = True
        """Nothing is open yet, so end; packages that are being imported would swallow a KeyboardInterrupt."""
        self._before: Any = None
        self.received = False
        """Errors after it are its consequences: peers that have ended, connections that are closed."""

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
            tell(self._command)
        if self.at_once:
            os._exit(EXIT_STATUS)
        raise KeyboardInterrupt


def ended_at_once(command: Callable[..., None]) -> Callable[..., None]:
    """A command that leaves nothing open: Ctrl-C ends it, also while packages are being imported."""

    @wraps(command)
    def interruptible(*arguments: Any, **options: Any) -> None:
        with CtrlC(command=command.__name__.replace("_", "-")):
            command(*arguments, **options)

    return interruptible


def tell(command: str) -> None:
    """Print the message without Python's buffers, because the signal may have interrupted a write to one."""
    told = TOLD if command == "train" else f"\ncomposer-dist {command}: interrupted.\n"
    os.write(2, told.encode())
