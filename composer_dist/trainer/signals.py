"""SIGTERM, by which schedulers and launchers ask a process to end: noted, and handled between batches."""

import signal
import threading
from collections.abc import Callable
from typing import Any

EXIT_STATUS = 128 + signal.SIGTERM
"""143, the status of a run that saved itself and exited on request. A shell reports the same for a process
killed by SIGTERM, so nothing that watches statuses takes the run for complete."""


class SigtermWatch:
    """Notes SIGTERM while it is installed, instead of dying, and calls `tell` in the main thread."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell
        self._before: Any = None
        self._installed = False
        self.received = False

    def install(self) -> None:
        """Replaces the present handler, unless that is another watch, which acts for both.

        Only the main thread can; others do nothing.
        """
        present = signal.getsignal(signal.SIGTERM)
        if isinstance(getattr(present, "__self__", None), SigtermWatch):
            return
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
            self._installed = True

    def restore(self) -> None:
        """Restores the previous handler."""
        if self._installed:
            # A handler that was installed by C code is None here, and cannot be put back.
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)
            self._installed = False

    def _note(self, number: int, frame: Any) -> None:
        self.received = True
        self._tell()
