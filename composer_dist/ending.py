"""Word between threads that something has ended, in spite of Ctrl-C."""

from __future__ import annotations

import threading


class Ending:
    """A `threading.Event` that is set once, and whose waiting Ctrl-C may interrupt at any instruction.

    Inside of `Event.wait` an interrupt can leave the event's own lock taken, because `Condition.__enter__`
    is Python code (3.11 to 3.14); then whoever sets the event, or waits again, hangs for good.
    """

    def __init__(self) -> None:
        self._over = False
        self._held = threading.Lock()
        self._held.acquire()

    def set(self) -> None:
        """It has ended; called once."""
        self._over = True
        self._held.release()

    def is_set(self) -> bool:
        """Whether it has."""
        return self._over

    def wait(self, seconds: float = -1) -> bool:
        """Whether it has, at the latest after so many seconds; by default there is no limit."""
        if not self._over and self._held.acquire(timeout=seconds):
            self._held.release()  # an interrupt before this does no harm: nobody looks at the lock again
        return self._over
