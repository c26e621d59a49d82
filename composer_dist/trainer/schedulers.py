"""Learning rates that follow the run's time: warm-up, then constant, linear or cosine.

They are functions of the clock and hold no state, so they are right in any `fit` and after any resume. Rates
are set before each batch, as multiples of the initial rates of the optimizers' groups. Names and formulas
are Composer's.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TypeGuard

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.trainer.clock import Time, TimeUnit
from composer_dist.trainer.state import State
from composer_dist.users_code import warn

_BASE = "initial_lr"  # torch's schedulers keep the first rate of a group under this key too


@dataclass(frozen=True)
class Schedule(ABC):
    """A factor for all learning rates, as a function of time; `dur` counts to the Trainer's `max_duration`.

    A `fit` that goes beyond `max_duration` counts to its own end.
    """

    t_warmup: Time | str = "0ba"
    """How long the factor rises from 0, linearly; "0ba" for not at all."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name.startswith("t_"):
                time = Time.of(getattr(self, field.name), unit=None)
                if time.value < 0 or (not time.value and field.name != "t_warmup"):
                    least = "not be negative" if field.name == "t_warmup" else "be positive"
                    raise ParallelismValueError(
                        f"{type(self).__name__}'s {field.name} is '{time}', but it must {least}."
                    )
                object.__setattr__(self, field.name, time)

    @abstractmethod
    def after_warmup(self, state: State, now: float, warmup: float, unit: TimeUnit) -> float:
        """The factor once the warm-up is over, of times in `unit`."""

    def factor(self, state: State) -> float:
        """What the learning rates are multiplied by in the next batch.

        Raises:
            ParallelismValueError: times are in units that cannot be compared.
        """
        unit = self._unit(state)
        now, warmup = state.passed(unit), _amount(state, self.t_warmup, unit)
        target = self.after_warmup(state, max(now, warmup), warmup, unit)
        return target * now / warmup if now < warmup else target

    def check_warmup(self, state: State) -> None:
        """Warns if training ends before the warm-up does, or its first epoch does not train."""
        unit = self._unit(state)
        try:
            end = _amount(state, _end(state), unit)
        except ParallelismValueError:  # no end, or one in another unit
            return
        now, warmup = state.passed(unit), _amount(state, self.t_warmup, unit)
        if unit is TimeUnit.EPOCH and not state.train_length and now == 0 < warmup:
            warn(
                f"{type(self).__name__} warms up for '{self.t_warmup}', but the number of batches in an "
                "epoch is unknown, so the learning rate changes only between epochs, and is 0 in all of the "
                "first one. Give max_duration and the times of the schedule in batches, such as '1000ba'."
            )
        if now < warmup and end <= warmup:
            warn(
                f"{type(self).__name__} warms up for '{self.t_warmup}', but training ends at "
                f"'{_end(state)}': the learning rate stays below {end / warmup:.2g} of its value. For a "
                "short run, give the warm-up as a share, such as t_warmup='0.1dur'."
            )

    def _unit(self, state: State) -> TimeUnit:
        """The unit in which this schedule compares times."""
        times = [getattr(self, field.name) for field in fields(self) if field.name.startswith("t_")]
        units = [time.unit for time in times if time.unit is not TimeUnit.DURATION and time.value]
        return units[0] if units else _end(state).unit


@dataclass(frozen=True)
class ConstantWithWarmupScheduler(Schedule):
    """Rises from 0 to `alpha`, and stays there."""

    alpha: float = 1.0

    def after_warmup(self, state: State, now: float, warmup: float, unit: TimeUnit) -> float:
        """`alpha`."""
        return self.alpha


@dataclass(frozen=True)
class _Annealing(Schedule):
    t_max: Time | str = "1dur"
    """When `alpha_f` is reached, counted from the start of the run."""
    alpha_f: float = 0.0
    """The last factor."""

    def _share(self, state: State, now: float, warmup: float, unit: TimeUnit) -> float:
        """How much of the time from the end of the warm-up to `t_max` has passed, at most 1."""
        end = _amount(state, self.t_max, unit)
        if end <= warmup:
            return float(now > warmup)  # until then it rises to the first factor
        return min((now - warmup) / (end - warmup), 1.0)


@dataclass(frozen=True)
class LinearWithWarmupScheduler(_Annealing):
    """Rises from 0 to `alpha_i`, then changes linearly to `alpha_f`."""

    alpha_i: float = 1.0

    def after_warmup(self, state: State, now: float, warmup: float, unit: TimeUnit) -> float:
        """Between `alpha_i` and `alpha_f`."""
        return self.alpha_i + self._share(state, now, warmup, unit) * (self.alpha_f - self.alpha_i)


@dataclass(frozen=True)
class CosineAnnealingWithWarmupScheduler(_Annealing):
    """Rises from 0 to 1, then falls to `alpha_f` along half a cosine (Loshchilov & Hutter, 2017)."""

    def after_warmup(self, state: State, now: float, warmup: float, unit: TimeUnit) -> float:
        """Between 1 and `alpha_f`."""
        share = self._share(state, now, warmup, unit)
        return self.alpha_f + (1 - self.alpha_f) * 0.5 * (1 + math.cos(math.pi * share))


@dataclass(frozen=True)
class _OfFunction(Schedule):
    """What a function of the state says."""

    function: Callable[[State], float] = lambda state: 1.0

    def factor(self, state: State) -> float:
        """What the function returns.

        Raises:
            ParallelismValueError: it is not a number from 0 on.
        """
        value = self.function(state)
        try:
            factor = float(value)
        except (TypeError, ValueError):
            factor = math.nan
        if isinstance(value, str) or not 0 <= factor < math.inf:
            name = getattr(self.function, "__qualname__", repr(self.function))
            raise ParallelismValueError(
                f"The schedule {name} must return what the learning rates are multiplied by, a finite number "
                f"that is not negative; after batch {state.timestamp.batch} it returned {value!r}."
            )
        return factor

    def after_warmup(self, state: State, now: float, warmup: float, unit: TimeUnit) -> float:
        """The same; a function has its own warm-up, or none."""
        return self.factor(state)

    def check_warmup(self, state: State) -> None:
        """Nothing is known about it."""


Schedules = LRScheduler | Schedule | Callable[[State], float]


def sorted_out(given: object, optimizers: Sequence[Optimizer]) -> tuple[list[LRScheduler], list[Schedule]]:
    """Torch's schedulers and ours; the groups' present rates become those that ours multiply.

    A function of the state is one of ours.
    """
    items = list(given) if isinstance(given, Sequence) else [] if given is None else [given]
    items = [_OfFunction(function=one) if _is_function(one) else one for one in items]
    if wrong := {type(one).__name__ for one in items if not isinstance(one, LRScheduler | Schedule)}:
        raise ParallelismTypeError(
            "schedulers takes schedulers of torch.optim.lr_scheduler, those of composer_dist.trainer, and "
            f"functions (state) -> factor, not {', '.join(sorted(wrong))}."
        )
    if any(isinstance(one, ReduceLROnPlateau) for one in items):
        raise ParallelismTypeError(
            "ReduceLROnPlateau needs a metric at each step, which the Trainer does not pass. Use another "
            "scheduler, or step it in a callback."
        )
    schedules = [one for one in items if isinstance(one, Schedule)]
    if schedules:
        for optimizer in optimizers:
            _base_rates(optimizer)
    return [one for one in items if isinstance(one, LRScheduler)], schedules


def _is_function(one: object) -> TypeGuard[Callable[[State], float]]:
    return callable(one) and not isinstance(one, type | LRScheduler | Schedule)


def set_rates(state: State, schedules: Sequence[Schedule]) -> None:
    """Sets all learning rates to what the schedules say for the next batch."""
    if not schedules:
        return
    factor = math.prod(schedule.factor(state) for schedule in schedules)
    for optimizer in state.optimizers:
        for group, base in zip(optimizer.param_groups, _base_rates(optimizer), strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(base * factor)
            else:
                group["lr"] = base * factor


def check_steps(state: State, every_batch: bool | None, epoch_length: int | None) -> None:
    """Warns if torch's schedulers would never move, and the user has not said that they step by epochs."""
    end = state.max_duration
    if not state.schedulers or every_batch is not None or end is None:
        return
    if (end.unit is TimeUnit.EPOCH and end.value <= 1) or (
        end.unit is TimeUnit.BATCH and epoch_length is not None and end.value <= epoch_length
    ):
        warn(
            f"Schedulers step after each epoch, and training ends at '{end}', within the first: "
            "the learning rate will not move. Pass step_schedulers_every_batch=True, or False if "
            "that is what you want."
        )


def _base_rates(optimizer: Optimizer) -> list[float]:
    return [float(group.setdefault(_BASE, float(group["lr"]))) for group in optimizer.param_groups]


def _end(state: State) -> Time:
    if state.schedule_end is None:
        raise ParallelismValueError("A schedule in 'dur' needs a max_duration.")
    return state.schedule_end


def _amount(state: State, time: Time | str, unit: TimeUnit) -> float:
    """A time in `unit`."""
    time = Time.of(time, unit=None)
    value, given = time.value, time.unit
    if given is TimeUnit.DURATION:
        end = _end(state)
        value, given = value * end.value, end.unit
    if given is unit or not value:
        return value
    if {given, unit} == {TimeUnit.EPOCH, TimeUnit.BATCH} and state.train_length:
        return value * state.train_length if unit is TimeUnit.BATCH else value / state.train_length
    raise ParallelismValueError(
        f"A schedule compares '{time}' with a time in '{unit}', which cannot be converted; give all of its "
        "times, and max_duration, in one unit."
    )
