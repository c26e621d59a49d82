"""Reports why one rank failed to the ranks that wait for it.

When a rank's own code raises, the others only see closed connections or a timeout. The first rank that fails
therefore writes the reason into the store, which torchrun's agent or rank 0 holds; a rank whose collective
fails reads it there and raises the same error, or names the rank whose process has ended. Without
failures this costs nothing.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

from composer_dist import _torch
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.distributed.ranks.failures import is_lost, merge, pack, unpack
from composer_dist.distributed.ranks.waiting import poll
from composer_dist.errors import ParallelismError, ParallelismRuntimeError
from composer_dist.wording import ranks_named

PATIENCE = timedelta(seconds=2)
"""How long a rank whose collective failed waits for a report."""


@contextmanager
def told_to_all(doing: Callable[[], str]) -> Iterator[None]:
    """Run a body on every rank; if it fails on one, the others raise its error, which names that rank.

    Args:
        doing: says what this rank does at the moment.
    """
    agreement = Agreement()
    rank = agreement.rank
    if len(agreement.ranks) == 1:
        with _noted(doing, ""):
            yield
        return
    store = _torch.get_default_store()
    key = f"composer_dist/report/{store.add(f'composer_dist/reporting/{rank}', 1)}"
    try:
        with _noted(doing, f"rank {rank}, "):
            yield
    except BaseException as error:
        if not is_lost(error) and not is_lost(error.__cause__):
            with suppress(RuntimeError):  # the store has gone with its host
                packed = merge({rank: pack(error)}, len(agreement.ranks), doing())
                store.compare_set(key, "", json.dumps([rank, packed]))
            raise
        if (reason := _explained(error, agreement, doing(), key)) is error:
            raise
        raise reason from error


@contextmanager
def lost_named(step: str) -> Iterator[None]:
    """Run collectives; if they fail because another rank has ended, the error names that rank and `step`."""
    try:
        yield
    except RuntimeError as error:
        agreement = Agreement()
        if isinstance(error, ParallelismError) or len(agreement.ranks) == 1 or not is_lost(error):
            raise
        raise _explained(error, agreement, step) from error


def reason_of_loss(error: BaseException, step: str) -> ParallelismError | None:
    """An error that names the rank whose end made collectives fail with `error`, if that is known."""
    return _await_reason(None, Agreement(), step) if is_lost(error) else None


def _explained(
    error: BaseException, agreement: Agreement, step: str, key: str | None = None
) -> BaseException:
    """The error to raise when a collective has failed because of another rank."""
    if (reason := _await_reason(key, agreement, step)) is not None:
        return reason
    if isinstance(error, ParallelismError):
        return error
    text = str(error).partition("\n")[0]
    return ParallelismRuntimeError(f"Another rank was lost at {step!r}; see its output. ({text})")


@contextmanager
def _noted(doing: Callable[[], str], rank: str) -> Iterator[None]:
    """Errors leave with a note that says where they arose."""
    try:
        yield
    except Exception as error:
        error.add_note(f"This was {rank}{doing()}.")
        raise


def _await_reason(key: str | None, agreement: Agreement, step: str) -> ParallelismError | None:
    """What another rank has reported under `key`, or which one has ended; None if nothing is known."""
    try:
        store = _torch.get_default_store()
        for _ in poll(PATIENCE, lambda: "the reason"):
            ended = agreement.lost()
            if key is not None and store.check([key]):
                rank, packed = json.loads(store.get(key))
                return None if rank == agreement.rank else unpack(*packed)
            if ended:
                who = ranks_named(ended).capitalize()
                return ParallelismRuntimeError(
                    f"{who} ended while rank {agreement.rank} was at {step!r}; see the output there."
                )
    except (RuntimeError, dist.DistError):
        return ParallelismRuntimeError(
            f"The launcher or rank 0, which hosts the store, ended at {step!r}; see its output."
        )
    return None
