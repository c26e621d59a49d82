"""Waiting that Ctrl-C interrupts, and waiting for threads at the end of the process."""

import _thread
import atexit
import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

from composer_dist.ending import Ending

T = TypeVar("T")
_log = logging.getLogger("composer_dist")
PATIENCE = timedelta(seconds=20)
"""How long a wait lasts before its reason is logged."""


def poll(limit: timedelta, what: Callable[[], str]) -> Iterator[None]:
    """Yield at intervals until time is up; unlike a store's own wait, Ctrl-C interrupts it.

    The intervals grow with the wait, so that it ends at most a tenth too late.

    A long wait is logged, with its reason from `what`.
    """
    start, silent = time.monotonic(), True
    yield
    while (waited := time.monotonic() - start) < limit.total_seconds():
        if silent and waited > PATIENCE.total_seconds():
            silent = False
            _log.warning("Waiting for %s, for %.0f s at most.", what(), limit.total_seconds())
        time.sleep(min(max(waited / 10, 0.0005), 0.1))
        yield


class Task(Generic[T]):
    """A call in a separate thread, with this thread's current device."""

    def __init__(self, body: Callable[[], T]) -> None:
        self.done = Ending()
        self._body = body
        self._device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None
        self._error: BaseException | None = None
        # Thread.start would wait forever for a thread that ends at once for lack of memory (Python 3.14).
        _thread.start_new_thread(self._run, ())

    def result(self) -> T:
        """The value that the call returned; raises its error."""
        if self._error is not None:
            raise self._error
        return self._value

    def abandon(self, interrupted: bool) -> None:
        """Wait for its end at exit only, because the interpreter aborts if a thread is inside torch then.

        It ends when the peer that it waits for does. After Ctrl-C on every rank, peers may wait for each
        other, so the signal ends this process instead.
        """
        atexit.register(self._await_end, interrupted)

    def _await_end(self, interrupted: bool) -> None:
        if not self.done.wait(2.0 if interrupted else 5.0) and interrupted:
            sys.stdout.flush()
            sys.stderr.flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)

    def _run(self) -> None:
        try:
            if self._device is not None:
                torch.accelerator.set_device_index(self._device)
            self._value = self._body()
        except BaseException as error:
            self._error = error
        finally:
            del self._body
            self.done.set()


_SETTLE = 0.05
"""Seconds that gloo's threads get at the end of the process."""


@atexit.register
def _await_threads() -> None:
    """Give gloo's threads time to let go of the tensors of the last collectives.

    They do this after a collective has returned, and need the interpreter for it. An interpreter that is
    ending ends such a thread, and the process aborts: "terminate called without an active exception".
    """
    if dist.is_available() and dist.is_initialized():
        time.sleep(_SETTLE)
