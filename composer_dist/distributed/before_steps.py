"""Checks before the steps of optimizers, also of those that other code has made for other models."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from composer_dist.errors import ParallelismRuntimeError

T = TypeVar("T")
Check: TypeAlias = Callable[[T, Optimizer], None]


def before_every_step(owner: T, choose: Callable[[T, Optimizer], Check[T] | None]) -> None:
    """Have `choose(owner, optimizer)` decide what is checked before each step of any optimizer.

    It decides at the optimizer's first step, and again when the optimizer gets or loses parameters, when one
    is frozen or thawed, and when this function is called; so an optimizer that has nothing to do with the
    owner costs next to nothing. All of it ends with `owner`. One hook of torch's serves the whole process
    and stays: the garbage collector could remove one while `Optimizer.step` iterates over them.

    Args:
        choose: returns the check, which must not hold `owner`; None if there is nothing to check at steps.
    """
    _register()
    _choices[:] = [*(one for one in _choices if one[0]() is not None), (ref(owner), choose)]
    _chosen.clear()


def refuse_uneven(steps: Sequence[tuple[int, int]]) -> None:
    """Raise a ParallelismRuntimeError if optimizers have stepped more often on some ranks: (rank, steps)."""
    rank, count = steps[0]
    if other := next((one for one in steps if one[1] != count), None):
        raise ParallelismRuntimeError(
            f"Optimizers have stepped {count} times on rank {rank}, but {other[1]} times on rank {other[0]}. "
            "Every rank must call optimizer.step() after the same batches, also where its own loss is not "
            "finite."
        )


def end_checks(owner: object) -> None:
    """Check nothing for `owner` any more."""
    _choices[:] = [one for one in _choices if one[0]() is not owner]
    _chosen.clear()


_choices: list[tuple[ref[Any], Callable[[Any, Optimizer], Check[Any] | None]]] = []
_chosen: WeakKeyDictionary[Optimizer, tuple[object, list[tuple[ref[Any], Check[Any]]]]] = WeakKeyDictionary()
"""For each optimizer its parameters, as they were when this was decided, and the checks."""


@cache
def _register() -> None:
    register_optimizer_step_pre_hook(torch.compiler.disable(_before_step))  # a user may compile `step`


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Check the optimizer; where a closure is yet to compute the gradients, after each call of it."""
    named = kwargs.get("closure")
    closure = named or next(iter(args[1:]), None)
    if not callable(closure):
        _check(optimizer)
        return None

    def checked(*args: Any, **kwargs: Any) -> Any:
        result = closure(*args, **kwargs)
        _check(optimizer)
        return result

    if named:
        return args, {**kwargs, "closure": checked}
    return (args[0], checked, *args[2:]), kwargs


def _check(optimizer: Optimizer) -> None:
    held = [
        [*map(id, group["params"]), *[p.requires_grad for p in group["params"]]]
        for group in optimizer.param_groups
    ]
    known, checks = _chosen.get(optimizer, (None, []))
    if known != held:
        found = [(one, choose(owner, optimizer)) for one, choose in _choices if (owner := one()) is not None]
        checks = [(one, check) for one, check in found if check is not None]
        _chosen[optimizer] = held, checks
    for one, check in checks:
        if (owner := one()) is not None:
            check(owner, optimizer)
