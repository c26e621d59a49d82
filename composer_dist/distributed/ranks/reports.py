"""Reports why one rank failed to the ranks that wait for it.

When a rank's own code raises, the others only see closed connections or a timeout. The first rank that fails
therefore writes the reason into the store, which torchrun's agent or rank 0 holds; a rank whose collective
fails reads it there and raises the same error, or names the rank whose process has ended. Without
failures this costs nothing.

gloo's connections close when a process ends (torch 2.13), and the store of rank 0 with them. A `HangGuard`
therefore looks for a report while its rank waits, and rank 0 ends once the others have read it.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

from composer_dist import _torch
from composer_dist._torch import Store
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.distributed.ranks.failures import PackedError, is_lost, merge, pack, unpack
from composer_dist.distributed.ranks.line import asking, keep_store
from composer_dist.distributed.ranks.loopback import host_has_ended, is_host
from composer_dist.distributed.ranks.waiting import poll
from composer_dist.errors import LostRankError, ParallelismError
from composer_dist.wording import ranks_named

PATIENCE = timedelta(seconds=2)
"""How long a rank whose collective failed waits for a report."""


class Report:
    """What the first rank that fails tells the others; the n-th one of each rank is the same one.

    Args:
        doing: says what this rank does at the moment.
    """

    def __init__(self, doing: Callable[[], str]) -> None:
        self.doing = doing
        self.agreement = Agreement()
        self.rank = self.agreement.rank
        self._others = [rank for rank in self.agreement.ranks if rank != self.rank]
        self._found: tuple[int, PackedError] | None = None
        if self._others:
            self._store = _torch.get_default_store()
            number = self._store.add(f"composer_dist/reporting/{self.rank}", 1)
            self._key = f"composer_dist/report/{number}"

    def look(self, store: Store | None = None) -> ParallelismError | None:
        """What another rank has reported; None if there is nothing yet.

        Args:
            store: a connection of the calling thread.
        """
        if self._found is None:
            store = store or self._store
            with asking():
                if not store.check([self._key]):
                    return None
                rank, packed = json.loads(store.get(self._key))
                self._found = rank, PackedError(*packed)
                store.set(f"{self._key}/seen/{self.rank}", "")
        return self.known()

    def known(self) -> ParallelismError | None:
        """What `look` has found."""
        if self._found is None or self._found[0] == self.rank:
            return None
        return unpack(*self._found[1])

    def settle(self, error: BaseException) -> BaseException:
        """The error to raise for `error`, raised here; it is reported to the others if it is the first."""
        if not self._others:
            return error
        lost = is_lost(error)
        if not lost:
            with suppress(RuntimeError):  # the store has gone with its host
                packed = merge({self.rank: pack(error)}, 1 + len(self._others), self.doing())
                with asking():
                    self._store.compare_set(self._key, "", json.dumps([self.rank, packed]))
                self.look()
        if is_host() and self._others:
            keep_store(self._all_know)
        return _explained(error, self.agreement, self.doing(), self) if lost else error

    def _all_know(self) -> bool:
        """Whether the other ranks have read the report, or have ended, or there is none."""
        ended = self.agreement.lost()
        reading = [f"{self._key}/seen/{rank}" for rank in self._others if rank not in ended]
        return not self._store.check([self._key]) or not reading or self._store.check(reading)


@contextmanager
def told_to_all(doing: Callable[[], str]) -> Iterator[Report]:
    """Run a body on every rank; if it fails on one, the others raise its error, which names that rank.

    Args:
        doing: says what this rank does at the moment.
    """
    report = Report(doing)
    try:
        with _noted(doing, f"rank {report.rank}, " if len(report.agreement.ranks) > 1 else ""):
            yield report
    except BaseException as error:
        if (reason := report.settle(error)) is error:
            raise
        raise reason.with_traceback(error.__traceback__) from None


@contextmanager
def lost_named(step: str) -> Iterator[None]:
    """Run collectives; if they fail because another rank has ended, the error names that rank and `step`."""
    try:
        yield
    except RuntimeError as error:
        agreement = Agreement()
        if isinstance(error, ParallelismError) or len(agreement.ranks) == 1 or not is_lost(error):
            raise
        raise _explained(error, agreement, step).with_traceback(error.__traceback__) from None


def reason_of_loss(error: BaseException, step: str) -> ParallelismError | None:
    """An error that names the rank whose end made collectives fail with `error`, if that is known."""
    return _await_reason(None, Agreement(), step) if is_lost(error) else None


def _explained(
    error: BaseException, agreement: Agreement, step: str, report: Report | None = None
) -> BaseException:
    """The error to raise when a collective has failed because of another rank."""
    if (reason := _await_reason(report, agreement, step)) is not None:
        return reason
    if isinstance(error, ParallelismError):
        return error
    return LostRankError(f"Another rank was lost at {step!r}; see its output.")


@contextmanager
def _noted(doing: Callable[[], str], rank: str) -> Iterator[None]:
    """Adds a note to errors that says where they were raised."""
    try:
        yield
    except Exception as error:
        error.add_note(f"This was {rank}{doing()}.")
        raise


def _await_reason(report: Report | None, agreement: Agreement, step: str) -> ParallelismError | None:
    """What another rank has reported, or which one has ended; None if nothing is known."""
    if report is not None and (known := report.known()) is not None:
        return known
    try:
        for _ in poll(PATIENCE, lambda: "the reason"):
            ended = agreement.lost()
            if report is not None and (reason := report.look()) is not None:
                return reason
            if ended:
                who = ranks_named(ended).capitalize()
                return LostRankError(
                    f"{who} ended while rank {agreement.rank} was at {step!r}; see the output there."
                )
    except (RuntimeError, dist.DistError):
        who = "Rank 0" if host_has_ended() else "The launcher or rank 0, which hosts the store,"
        return LostRankError(
            f"{who} ended while rank {agreement.rank} was at {step!r}; see the output there."
        )
    return None
