"""SIGTERM, by which schedulers and launchers ask a process to end: it is noted and handled between batches.

The workers of dataloaders leave it to their parent.
"""

import mmap
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.util import Finalize
from types import FrameType
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


@dataclass(frozen=True)
class IgnoreSigterm:
    """A DataLoader's `worker_init_fn`: SIGTERM ends a forked worker only if its parent closes it, or is gone.

    Schedulers send it to all processes of a job. The parent notes it, but needs another batch before all
    ranks can save. Workers that are not forked end as torch has them end.
    """

    then: Callable[[int], None] | None = None
    """Another one, which runs afterwards."""

    def __call__(self, worker: int) -> None:  # noqa: D102
        if _exits is not None and _exits[0] == os.getppid():
            signal.signal(signal.SIGTERM, _on_sigterm)
        if self.then is not None:
            self.then(worker)


_exits: tuple[int, mmap.mmap] | None = None
"""The process that forks workers, and a byte that it shares with them: whether it exits."""


def spare_workers(dataloader: Any) -> None:
    """Have the workers of a torch DataLoader, whose iterators are made later, ignore a SIGTERM of others."""
    global _exits
    first = getattr(dataloader, "worker_init_fn", IgnoreSigterm())
    if isinstance(first, IgnoreSigterm):
        return
    try:
        dataloader.worker_init_fn = IgnoreSigterm(first)
    except AttributeError:  # a wrapper that only shows it
        return
    if _exits is None or _exits[0] != os.getpid():
        _exits = os.getpid(), mmap.mmap(-1, 1)
        # At its exit, before multiprocessing sends SIGTERM to them and then waits without limit.
        Finalize(None, _end_workers, _exits, exitpriority=0)


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    assert _exits is not None
    parent, exits = _exits
    closed = exits[0] or os.getppid() != parent
    while frame is not None and not closed:
        done = frame.f_locals.get("done_event")  # torch's worker loop has it, which sets it when it is closed
        closed, frame = done is not None and done.is_set(), frame.f_back
    if closed:
        os._exit(0)  # as torch's own handler does


def _end_workers(parent: int, exits: mmap.mmap) -> None:
    exits[0] = 1
    workers = [one for one in multiprocessing.active_children() if one.daemon]
    for worker in workers:
        worker.terminate()
    end = time.monotonic() + _LONGEST
    for worker in workers:
        worker.join(max(end - time.monotonic(), 0))
        if worker.is_alive():
            worker.kill()


_LONGEST = 5.0
"""Seconds that workers have to end when their parent exits."""
