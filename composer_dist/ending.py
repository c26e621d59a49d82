"""An event that tells other threads that something has ended, and survives Ctrl-C."""

import math
import threading
import time

_SLICE = 1.0
"""Seconds of one wait for the lock, in which a Ctrl-C may go unnoticed."""


class Ending:
    """A `threading.Event` that is set once; Ctrl-C may interrupt a wait for it at any instruction.

    An interrupt inside of `Event.wait` can leave the event's own lock taken, because `Condition.__enter__`
    is Python code (3.11 to 3.14); then a thread that sets the event, or waits again, hangs forever. And one
    that comes just before a lock blocks is noticed only when that returns.
    """

    def __init__(self) -> None:
        self._over = False
        self._held = threading.Lock()
        self._held.acquire()

    def set(self) -> None:
        """Set it; called once."""
        self._over = True
        self._held.release()

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._over

    def wait(self, seconds: float = math.inf) -> bool:
        """Whether it is set, after at most so many seconds; by default there is no limit."""
        until = time.monotonic() + seconds
        while not self._over and (left := until - time.monotonic()) > 0:
            if self._held.acquire(timeout=min(left, _SLICE)):
                self._held.release()  # an interrupt before this does no harm: nobody looks at the lock again
        return self._over
