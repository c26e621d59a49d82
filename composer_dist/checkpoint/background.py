"""Saving while training goes on.

What is to be saved is copied to host memory, into buffers that the next save uses again, and a thread writes
it. The thread makes no collectives, and its agreements have a line of their own in the store. At most one
save is under way. The interpreter does not end before it has: the thread is no daemon.
"""

from __future__ import annotations

import logging
import threading
from typing import Protocol

import torch
from torch import Tensor

from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.ending import Ending

_log = logging.getLogger("composer_dist")


class Buffers:
    """Host memory by what it is for."""

    def __init__(self) -> None:
        self._held: dict[object, Tensor] = {}
        self._used: dict[object, Tensor] = {}

    def copy(self, key: object, values: Tensor) -> Tensor:
        """`values` on the CPU, in memory of its own; a copy from an accelerator may be under way."""
        held, there = self._held.pop(key, None), values.device.type != "cpu"
        if held is None or (held.shape, held.dtype) != (values.shape, values.dtype):
            held = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=there)
        self._used[key] = held.copy_(values, non_blocking=there)
        return held

    def complete(self) -> None:
        """Wait for the copies, and let go of what was not used this time."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self._held, self._used = self._used, {}


class Job(Protocol):
    """A save, planned."""

    def stage(self, buffers: Buffers) -> None:
        """Copy all that training may change."""

    def run(self, agreement: Agreement) -> None:
        """Write it."""


class PendingSave:
    """A save under way."""

    def __init__(self, job: Job, agreement: Agreement) -> None:
        self._agreement = agreement
        self._error: BaseException | None = None
        self._claim = threading.Lock()
        self._ended = Ending()
        self._thread = threading.Thread(target=self._run, args=(job, agreement), name="composer_dist-save")

    def begin(self) -> None:
        """Have the thread begin. One that has begun goes on, also where Ctrl-C comes right then."""
        try:
            self._thread.start()
        except BaseException as error:  # Ctrl-C, or there are no more threads
            if self._claim.acquire(blocking=False):  # it has not begun, and now it will not
                self._ended.set()
                self._agreement.leave(error)
            raise

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def check(self) -> None:
        """Raise what went wrong, if anything has so far, the same on every rank; does not wait.

        Raises:
            CheckpointError: as from `save_checkpoint`; only once.
        """
        if self.done:
            self.wait()

    def wait(self) -> None:
        """Return when the checkpoint is complete.

        Raises:
            CheckpointError: as from `save_checkpoint`; only once.
        """
        global _pending
        self._ended.wait()  # Ctrl-C during Thread.join() has Python 3.11 and 3.12 take the thread for ended
        if _pending is self:
            _pending = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, job: Job, agreement: Agreement) -> None:
        if not self._claim.acquire(blocking=False):
            return
        try:
            job.run(agreement)
        except BaseException as error:
            self._error = error
            _log.error("An asynchronous save failed: %s", error)
        finally:
            self._ended.set()


_pending: PendingSave | None = None


_buffers = Buffers()


def finish_pending() -> None:
    """Wait for the save under way, if there is one, and raise what went wrong."""
    if _pending is not None:
        _pending.wait()


def stage(job: Job) -> None:
    """Copy what a job saves; no other save is under way."""
    with Agreement().together("copying to host memory"):
        job.stage(_buffers)
        _buffers.complete()


def in_background(job: Job) -> PendingSave:
    """Have a thread write what has been staged."""
    global _pending
    agreement = Agreement(line="saves")
    agreement.begin()
    _pending = PendingSave(job, agreement)
    _pending.begin()
    return _pending
