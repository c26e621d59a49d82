"""Learning rates of groups that are added later, and the schedulers that change them.

Torch's schedulers keep lists with an entry for each group, made when they are built. They would fail at the
next step after a group is added.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

_PER_GROUP = ("base_lrs", "max_lrs", "min_lrs", "base_momentums", "max_momentums", "lr_lambdas")
_PEAKS = ("max_lr", "min_lr")
"""Rates that a scheduler keeps in the group; their ratio to the group's rate is kept."""


def extend(
    schedulers: Sequence[LRScheduler], optimizer: Optimizer, source: int, keep_lambdas: bool
) -> list[LRScheduler]:
    """Extends the schedulers of an optimizer for its last group, which is new.

    It follows the schedule of group `source`, with `keep_lambdas` also if that is a function of time. Returns
    the schedulers that do not change its rate.
    """
    apart = []
    for scheduler in _of(schedulers, optimizer):
        for name in _PER_GROUP:
            values = getattr(scheduler, name, None)
            if not isinstance(values, list) or len(values) >= len(optimizer.param_groups):
                continue
            if name == "lr_lambdas" and not keep_lambdas:
                values.append(_unmoved)
                apart.append(scheduler)
            else:
                values.append(values[source])
    return apart


def rebase(schedulers: Sequence[LRScheduler], optimizer: Optimizer, index: int, lr: float) -> None:
    """Makes a group and its schedules start from `lr`, and scales the group's rate in proportion."""
    group = optimizer.param_groups[index]
    base = float(group.get("initial_lr", group["lr"]))
    ratio = lr / base if base else 1.0
    for key in ("lr", *_PEAKS):
        if isinstance(group.get(key), int | float | Tensor):
            group[key] = group[key] * ratio
    if not base:
        group["lr"] = like(group["lr"], lr)
    if "initial_lr" in group:
        group["initial_lr"] = like(group["initial_lr"], lr)
    for scheduler in _of(schedulers, optimizer):
        if hasattr(scheduler, "base_lrs"):
            scheduler.base_lrs[index] = like(scheduler.base_lrs[index], lr)
        if hasattr(scheduler, "max_lrs"):
            scheduler.max_lrs[index] = scheduler.max_lrs[index] * ratio


def has_lambdas(schedulers: Sequence[LRScheduler], optimizer: Optimizer) -> bool:
    """Whether a schedule of this optimizer is a function of time."""
    return any(hasattr(scheduler, "lr_lambdas") for scheduler in _of(schedulers, optimizer))


def like(old: float | Tensor, new: float) -> float | Tensor:
    """A rate of the same type as the old one: a tensor if the optimizer uses one."""
    return old.new_tensor(new) if isinstance(old, Tensor) else new


def _unmoved(epoch: int) -> float:
    """A function of time that does not change a rate."""
    return 1.0


def _of(schedulers: Sequence[Any], optimizer: Optimizer) -> Iterator[Any]:
    """The schedulers of one optimizer, including those inside others."""
    for scheduler in schedulers:
        if scheduler.optimizer is optimizer:
            yield scheduler
        yield from _of(getattr(scheduler, "_schedulers", ()), optimizer)
