"""Saves in the background, while training continues.

The state is copied to host memory, into buffers that the next save reuses, and a thread writes it. The
thread runs no collectives, and its agreements use separate keys in the store. At most one save is in
progress. The thread is not a daemon, so the interpreter waits for it before it exits.
"""

import atexit
import logging
import threading
from typing import Protocol

import torch
from torch import Tensor

from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.distributed.ranks.process_group import world_and_rank
from composer_dist.ending import Ending
from composer_dist.errors import CheckpointError

_log = logging.getLogger("composer_dist")


class Buffers:
    """Host memory buffers by key."""

    def __init__(self) -> None:
        self._held: dict[object, Tensor] = {}
        self._used: dict[object, Tensor] = {}

    def copy(self, key: object, values: Tensor) -> Tensor:
        """Copy `values` to separate CPU memory; a copy from an accelerator may still be in progress."""
        held, there = self._held.pop(key, None), values.device.type != "cpu"
        if held is None or (held.shape, held.dtype) != (values.shape, values.dtype):
            held = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=there)
        self._used[key] = held.copy_(values, non_blocking=there)
        return held

    def complete(self) -> None:
        """Wait for the copies, and release buffers that were not used this time."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self._held, self._used = self._used, {}


class Job(Protocol):
    """A planned save."""

    def stage(self, buffers: Buffers) -> None:
        """Copy everything that training may change."""

    def run(self, agreement: Agreement) -> None:
        """Write it."""


class PendingSave:
    """A save in progress."""

    def __init__(self, job: Job, agreement: Agreement) -> None:
        self._agreement = agreement
        self._error: BaseException | None = None
        self._claim = threading.Lock()
        self._ended = Ending()
        self._thread = threading.Thread(target=self._run, args=(job, agreement), name="composer_dist-save")

    def begin(self) -> None:
        """Start the thread. Once it has started, it continues even if Ctrl-C arrives at that moment."""
        try:
            self._thread.start()
        except BaseException as error:  # Ctrl-C, or no thread can be started
            if self._claim.acquire(blocking=False):  # it has not started, and now it cannot
                self._ended.set()
                self._agreement.leave(error, "saving in the background")
            raise

    @property
    def done(self) -> bool:
        """Whether it has ended, successfully or not."""
        return self._ended.is_set()

    def done_within(self, seconds: float) -> bool:
        """Whether it has ended, after waiting at most so long."""
        return self._ended.wait(seconds)

    def check(self) -> None:
        """Raise the error if the save has failed, the same on every rank; does not wait.

        Raises:
            CheckpointError: as from `save_checkpoint`; every time.
        """
        if self.done:
            self.wait()

    def wait(self) -> None:
        """Return when the checkpoint is complete.

        Raises:
            CheckpointError: as from `save_checkpoint`; every time.
        """
        global _pending
        self._ended.wait()  # after Ctrl-C in Thread.join(), Python 3.11 and 3.12 think the thread has ended
        if _pending is self:
            _pending = None
        if self._error is not None:  # it stays: whoever asks first may not be the one who began the save
            raise self._error

    def _run(self, job: Job, agreement: Agreement) -> None:
        if not self._claim.acquire(blocking=False):
            return
        try:
            job.run(agreement)
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()


_pending: PendingSave | None = None

_buffers = Buffers()


@atexit.register
def _tell_at_exit() -> None:
    """Log an error that nobody has asked for."""
    if _pending is not None and _pending._error is not None:
        _log.error("An asynchronous save failed: %s", _pending._error)


def finish_pending() -> None:
    """Wait for the save in progress, if there is one, and raise its error; only once."""
    if _pending is not None:
        _pending.wait()


def finish_another() -> None:
    """Wait for a save that something else has begun; if it fails, rank 0 logs that."""
    try:
        finish_pending()
    except CheckpointError as error:
        if world_and_rank()[1] == 0:
            _log.warning("Another save in the background failed: %s", error)


def stage(job: Job) -> None:
    """Copy what a job saves; no other save is in progress."""
    with Agreement().together("copying to host memory"):
        job.stage(_buffers)
        _buffers.complete()


def in_background(job: Job) -> PendingSave:
    """Write what has been staged in a thread."""
    global _pending
    agreement = Agreement(line="saves")
    agreement.begin()
    _pending = PendingSave(job, agreement)
    _pending.begin()
    return _pending
