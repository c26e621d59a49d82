"""Durations and intervals of training, and the clock that counts them.

A `Time` is a number with a unit: `3ep`, `100ba`, `5000sp`, `3e4tok`, `0.5dur` (a share of the whole
training), `90sec`, also written `1h30m`. A `Timestamp` counts all the units at once.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from functools import total_ordering
from math import isfinite
from typing import Any, Self

from composer_dist.errors import ParallelismTypeError, ParallelismValueError


class NoTokensError(ParallelismValueError):
    """A time in tokens, for batches without any."""


class TimeUnit(StrEnum):
    """What time is counted in."""

    EPOCH = "ep"
    BATCH = "ba"
    SAMPLE = "sp"
    TOKEN = "tok"
    DURATION = "dur"
    SECOND = "sec"


_UNITS = "|".join(unit.value for unit in TimeUnit)
_DECIMAL = r"(?:\d+(?:_\d+)*)?\.?\d+"
_NUMBER = re.compile(rf"({_DECIMAL}(?:e[+-]?\d+)?)\s*({_UNITS})")
_CLOCK_SECONDS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_CLOCK = re.compile(r"(?=[\d.])" + "".join(rf"(?:(?P<{unit}>{_DECIMAL}){unit})?" for unit in _CLOCK_SECONDS))
_REAL = (TimeUnit.DURATION, TimeUnit.SECOND)


@total_ordering
@dataclass(frozen=True, eq=False)
class Time:
    """An amount of one unit. Only amounts of the same unit add and compare.

    Wherever arithmetic or a comparison takes a Time, it takes a time string too.
    """

    value: float
    """An integer, except in `dur` and `sec`."""
    unit: TimeUnit

    def __post_init__(self) -> None:
        if not isinstance(self.unit, TimeUnit):
            object.__setattr__(self, "unit", TimeUnit(self.unit))
        if self.unit in _REAL:
            object.__setattr__(self, "value", float(self.value))
        elif self.value == int(self.value):
            object.__setattr__(self, "value", int(self.value))
        else:
            raise ParallelismValueError(
                f"'{self.value}{self.unit}' is not a whole number; only 'dur' and 'sec' may be fractions."
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """The Time that a string such as `"1ep"`, `"3e4tok"` or `"1h30m"` names.

        Raises:
            ParallelismValueError: the string is not a duration.
        """
        stripped = text.strip().lower() if len(text) < 100 else ""  # longer ones take quadratic time
        if (match := _NUMBER.fullmatch(stripped)) and isfinite(float(match[1])):
            return cls(float(match[1]), TimeUnit(match[2]))
        if match := _CLOCK.fullmatch(stripped):
            amounts = match.groupdict(default="0").items()
            seconds = sum(float(amount) * _CLOCK_SECONDS[unit] for unit, amount in amounts)
            return cls(seconds, TimeUnit.SECOND)
        raise ParallelismValueError(
            f"{text!r} is not a valid duration. Use a number and a unit: '3ep' (epochs), '100ba' (batches), "
            "'5000sp' (samples), '3e4tok' (tokens), '0.5dur' (share of the training), '90sec', "
            "'1h30m'."
        )

    @classmethod
    def from_timestring(cls, timestring: str) -> Self:
        """`parse`, as Composer calls it."""
        return cls.parse(timestring)

    @classmethod
    def of(cls, time: Time | str | int, unit: TimeUnit | None = TimeUnit.EPOCH) -> Time:
        """`time` itself, the one that a string names, or a bare integer of `unit`.

        Raises:
            ParallelismTypeError: anything else, or an integer where no unit is understood.
        """
        if isinstance(time, Time):
            return time
        if isinstance(time, str):
            return cls.parse(time)
        if isinstance(time, int) and not isinstance(time, bool) and unit is not None:
            return cls(time, unit)
        raise ParallelismTypeError(f"{time!r} is not a valid duration; pass a Time or a string like '10ba'.")

    @classmethod
    def positive(cls, name: str, time: Time | str | int) -> Time:
        """`Time.of(time)`; `name` is what the user calls it, for the error.

        Raises:
            ParallelismValueError: it is not positive.
        """
        found = cls.of(time)
        if not found.value > 0:
            raise ParallelismValueError(f"{name} must be positive, not '{found}'.")
        return found

    def __str__(self) -> str:
        """As a time string."""
        return f"{self.value:{'g' if self.unit in _REAL else 'd'}}{self.unit.value}"

    def __add__(self, other: Time | str) -> Time:
        return Time(self.value + self._same(other), self.unit)

    __radd__ = __add__

    def __sub__(self, other: Time | str) -> Time:
        return Time(self.value - self._same(other), self.unit)

    def __rsub__(self, other: Time | str) -> Time:
        return Time(self._same(other) - self.value, self.unit)

    def __mul__(self, factor: float) -> Time:
        """The product; whole units are rounded down."""
        product = self.value * factor
        return Time(product if self.unit in _REAL else int(product + 1e-9), self.unit)

    __rmul__ = __mul__

    def __truediv__(self, other: Time | str) -> float:
        """The ratio of two times of one unit."""
        return self.value / self._same(other)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            try:
                other = Time.of(other)
            except ParallelismValueError:
                return False
        if not isinstance(other, Time):
            return NotImplemented
        return (self.value, self.unit) == (other.value, other.unit)

    def __lt__(self, other: Time | str) -> bool:
        return self.value < self._same(other)

    def __hash__(self) -> int:
        return hash(str(self))  # as this string's, to which it is equal

    def __bool__(self) -> bool:
        return self.value != 0

    def _same(self, other: Time | str) -> float:
        other = Time.of(other, unit=None)
        if other.unit is not self.unit:
            raise ParallelismValueError(f"'{self}' and '{other}' are in different units.")
        return other.value


@dataclass(frozen=True, kw_only=True)
class Timestamp:
    """How far training has come. Samples and tokens count all ranks."""

    epoch: int = 0
    """Epochs finished."""
    batch: int = 0
    sample: int = 0
    token: int = 0
    batch_in_epoch: int = 0
    sample_in_epoch: int = 0
    token_in_epoch: int = 0
    seconds: float = 0.0
    """Time spent in `fit`, rank 0's."""

    def get(self, unit: TimeUnit | str) -> Time:
        """What has passed, in one unit.

        Raises:
            ParallelismValueError: the unit is `dur`, which only the State knows, or tokens, of which the
                batches have none.
        """
        unit = TimeUnit(unit)
        if unit is TimeUnit.TOKEN and self.batch and not self.token:
            raise NoTokensError(
                "A time is given in tokens ('tok'), but the batches have none: no mapping with 'input_ids'. "
                "Use batches ('ba'), samples ('sp') or epochs ('ep')."
            )
        if unit is TimeUnit.DURATION:
            raise ParallelismValueError("A Timestamp has no 'dur'; use State.elapsed_duration().")
        return Time(getattr(self, _FIELDS[unit]), unit)

    def reached(self, time: Time | str) -> bool:
        """Whether at least `time` has passed."""
        time = Time.of(time, unit=None)
        return self.get(time.unit).value >= time.value

    def next_batch(self, *, samples: int = 0, tokens: int = 0, seconds: float | None = None) -> Timestamp:
        """The time after one more batch of `samples` and `tokens`, ended at `seconds`."""
        return replace(
            self,
            batch=self.batch + 1,
            sample=self.sample + samples,
            token=self.token + tokens,
            batch_in_epoch=self.batch_in_epoch + 1,
            sample_in_epoch=self.sample_in_epoch + samples,
            token_in_epoch=self.token_in_epoch + tokens,
            seconds=self.seconds if seconds is None else seconds,
        )

    def next_epoch(self) -> Timestamp:
        """The time at the start of the next epoch."""
        return replace(self, epoch=self.epoch + 1, batch_in_epoch=0, sample_in_epoch=0, token_in_epoch=0)

    def state_dict(self) -> dict[str, Any]:
        """The counters, by name."""
        return asdict(self)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        """The inverse of `state_dict`.

        Raises:
            ParallelismValueError: a counter is missing or unknown.
        """
        check_keys("Timestamp", state, {field.name for field in fields(cls)})
        return cls(**state)


def check_keys(what: str, state: Mapping[str, Any], keys: Collection[str]) -> None:
    """Raise unless the saved state of `what` has exactly these keys."""
    if wrong := set(keys).symmetric_difference(state):
        listing = ", ".join(sorted(wrong))
        raise ParallelismValueError(f"Not a {what} state: missing or unknown keys: {listing}.")


def end_of_fit(now: Timestamp, planned: Time | None, duration: Time | None) -> Time:
    """Where a `fit` of `duration` ends, or of what is left of the `planned` training."""
    if duration is None:
        if planned is None:
            raise ParallelismValueError("No training length given: pass max_duration or fit(duration=...).")
        if now.reached(planned):
            raise ParallelismValueError(
                f"Training has already reached max_duration='{planned}'; continue with fit(duration=...)."
            )
        return planned
    if duration.unit is TimeUnit.DURATION:
        if planned is None:
            raise ParallelismValueError(f"'{duration}' is a share of max_duration, which is None.")
        duration = _share(planned, duration)
    return now.get(duration.unit) + duration


def _share(planned: Time, share: Time) -> Time:
    """A share of the `planned` training, in its unit."""
    value = planned.value * share.value
    if planned.unit in _REAL:
        return Time(value, planned.unit)
    whole = int(value + 1e-9)  # 0.29 of 100 is 28.999999999999996
    if not whole or (planned.unit is TimeUnit.EPOCH and value - whole > 1e-9):
        raise ParallelismValueError(
            f"A fit of '{share}' of max_duration='{planned}' would last {value:.4g}{planned.unit}: epochs "
            "must be whole, and any other unit at least 1. Give the duration in batches, such as '100ba'."
        )
    return Time(whole, planned.unit)


_FIELDS = {
    TimeUnit.EPOCH: "epoch",
    TimeUnit.BATCH: "batch",
    TimeUnit.SAMPLE: "sample",
    TimeUnit.TOKEN: "token",
    TimeUnit.SECOND: "seconds",
}
