"""When gradients are synchronized, and how they add up over the microbatches of a batch.

FSDP2 and DDP reduce the gradients that they manage; `average_plain_gradients` averages those of parameters
that stay whole on purpose (a scalar, `Rule(shard=False)`). `no_sync` and `accumulate` apply to all of them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

from torch import nn
from torch.distributed.fsdp import FSDPModule

from composer_dist import _torch
from composer_dist.config.base import require
from composer_dist.distributed import prepared
from composer_dist.errors import ParallelismRuntimeError
from composer_dist.wording import listed

Accumulate = Literal["sharded", "unsharded"]


def check_accumulate(how: object) -> None:
    """Raise a ParallelismValueError unless `how` is a way to accumulate."""
    require("accumulate", how, get_args(Accumulate))


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
    check_accumulate(how)
    with synchronizing(model, lambda what: last or (how == "sharded" and what == "reduce_grads")):
        yield


def accumulated_bytes(model: nn.Module, how: Accumulate = "sharded") -> int:
    """Bytes of unsharded gradients that a rank keeps from one microbatch to the next."""
    if how == "sharded":
        return 0
    return sum(_torch.accumulated_nbytes(m) for m in model.modules() if isinstance(m, FSDPModule))


@contextmanager
def no_sync(model: nn.Module, enabled: bool = True) -> Iterator[None]:
    """Accumulate gradients locally: backward inside this context communicates none.

    Forward belongs inside too (DDP decides there). The next backward outside synchronizes the sum.
    Every module's own state from before is restored on the way out, also after an exception, so
    that contexts nest. FSDP2, HSDP, DDP, composable replicate and `average_plain_gradients` obey.

    Args:
        model: the module under which gradients stay local.
        enabled: False does the opposite: backward inside synchronizes, whatever an outer context says.
    """
    with synchronizing(model, lambda what: not enabled):
        yield


@contextmanager
def synchronizing(model: nn.Module, decide: Callable[[str], bool]) -> Iterator[None]:
    """Inside, backward reduces the gradients for whose flags `decide` returns True.

    Raises:
        ParallelismRuntimeError: a hook of a sharded parameter would not run.
    """
    flags: list[tuple[object, str, bool]] = []
    units: list[nn.Module] = []
    for module in _modules(model):
        kind: Any = type(module)
        if _torch.synchronizes(kind):
            flags += _torch.gradient_sync_flags(module)
            units.append(module)
        if known := prepared.of(module):
            flags += [(averaging, "sync", True) for averaging in known.averagings]
    before = [(owner, attribute, getattr(owner, attribute)) for owner, attribute, _ in flags]
    try:
        for owner, attribute, synchronizes in flags:
            setattr(owner, attribute, synchronizes == decide(attribute))
        if hooked := [name for unit in units for name in _torch.postponed_hooks(unit)]:
            raise ParallelismRuntimeError(
                f"{listed(hooked)} has hooks of register_post_accumulate_grad_hook, which FSDP2 calls when "
                "it reduces gradients, and a backward here would not reduce them. Leave out no_sync (in the "
                "Trainer with dp_replicate, microbatches), or change .grad after the last backward."
            )
        yield
    finally:
        for owner, attribute, value in before:
            setattr(owner, attribute, value)


def _modules(model: nn.Module) -> list[nn.Module]:
    """`model.modules()`, in a fraction of the time, because microbatches are many."""
    found, seen = [model], {model}
    for module in found:
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                found.append(child)
    return found
