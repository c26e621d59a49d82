"""Gradients that add up over the microbatches of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from torch import nn
from torch.distributed.fsdp import FSDPModule

from composer_dist import _torch
from composer_dist.distributed.gradients import synchronising
from composer_dist.errors import ParallelismValueError

Accumulate = Literal["sharded", "unsharded"]


@contextmanager
def accumulate(model: nn.Module, last: bool, how: Accumulate = "sharded") -> Iterator[None]:
    """Forward and backward of one of several microbatches, whose gradients add up until the last.

    "sharded" reduces each microbatch's gradients to shards at once, so that no rank ever holds more of
    them; across HSDP's replicas, and of replicated parameters, only the sum is reduced, on the last.
    "unsharded" reduces everything once, on the last, and holds the gradients of whole parameters until
    then: `accumulated_bytes` says how many.

    Args:
        model: prepared; `zero_grad` belongs before the first microbatch.
        last: whether this is the last microbatch.
        how: the same for all microbatches of a batch.

    Raises:
        ParallelismValueError: another word.
    """
    if how not in ("sharded", "unsharded"):
        raise ParallelismValueError(f"accumulate is 'sharded' or 'unsharded', not {how!r}.")
    with synchronising(model, lambda what: last or (how == "sharded" and what == "reduce_grads")):
        yield


def accumulated_bytes(model: nn.Module, how: Accumulate = "sharded") -> int:
    """What a rank holds, beside its shards, of gradients that accumulate from one microbatch to the next."""
    if how == "sharded":
        return 0
    return sum(_torch.accumulated_nbytes(m) for m in model.modules() if isinstance(m, FSDPModule))
