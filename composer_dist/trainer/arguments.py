"""Checks of the Trainer's arguments."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.trainer.clock import Time, TimeUnit

if TYPE_CHECKING:
    from composer_dist.precision import Precision

SECTIONS = ("setup", "step", "evaluation", "save", "load")
"""Of a run, for a `HangGuard`."""
T = TypeVar("T")


def as_list(name: str, given: T | Sequence[T] | None, kind: type[T]) -> list[T]:
    """One or several objects of a kind as a list."""
    items: list[Any] = list(given) if isinstance(given, Sequence) else [] if given is None else [given]
    if wrong := {type(item).__name__ for item in items if not isinstance(item, kind)}:
        raise ParallelismTypeError(
            f"{name} takes a {kind.__name__} or a sequence of them, not {', '.join(sorted(wrong))}."
        )
    return items


def positive(name: str, time: Time | str | int | None) -> Time | None:
    """A time, unless there is none."""
    return None if time is None else Time.positive(name, time)


def subset_size(name: str, batches: int | None) -> int | None:
    """A number of batches, unless all count, for which Composer has -1."""
    if batches == -1:
        return None
    if batches is not None and (type(batches) is not int or batches < 1):  # True is one, but says nothing
        raise ParallelismValueError(f"{name} must be a positive number of batches, not {batches!r}.")
    return batches


def check_duration(max_duration: Time | str | int | None) -> Time | None:
    """The length of a run, which is positive and not a share of itself."""
    found = positive("max_duration", max_duration)
    if found is not None and found.unit is TimeUnit.DURATION:
        raise ParallelismValueError(
            f"max_duration='{found}' is a share of max_duration itself. Give batches or epochs."
        )
    return found


def hang_limits(given: object) -> dict[str, float] | float | None:
    """Seconds for a `HangGuard`, of a `hang_timeout`; infinity if it is False."""
    if given is False:
        return math.inf
    if given is None or given is True:
        return None
    if not isinstance(given, Mapping):
        return _seconds("hang_timeout", given)
    if unknown := sorted(set(given) - set(SECTIONS), key=str):
        named = ", ".join(map(repr, unknown))
        raise ParallelismValueError(f"hang_timeout has no section {named}; it has {', '.join(SECTIONS)}.")
    return {section: _seconds(f"hang_timeout[{section!r}]", one) for section, one in given.items()}


def _seconds(name: str, given: object) -> float:
    """Of a time string in seconds, minutes or hours, or of a number of them."""
    number = isinstance(given, int | float) and not isinstance(given, bool)
    with suppress(ParallelismValueError):
        time = Time.parse(f"{given}sec" if number else str(given))
        if time.unit is TimeUnit.SECOND and time.value > 0:
            return float(time.value)
    raise ParallelismValueError(
        f"{name}={given!r} is not a positive time; write '60s', '1h30m' or a number of seconds."
    )


def check_microbatch_size(size: object) -> None:
    """Refuses what is neither a number of samples, "auto" nor None."""
    if size not in (None, "auto") and (not isinstance(size, int) or size < 1):
        raise ParallelismValueError(
            f"device_train_microbatch_size is a positive number of samples, 'auto' or None, not {size!r}."
        )


CHECKS: Mapping[str, Callable[[Any], object]] = {
    "max_duration": check_duration,
    "eval_interval": partial(positive, "eval_interval"),
    "hang_timeout": hang_limits,
    "device_train_microbatch_size": check_microbatch_size,
    "train_subset_num_batches": partial(subset_size, "train_subset_num_batches"),
    "eval_subset_num_batches": partial(subset_size, "eval_subset_num_batches"),
}
"""Checks of single arguments of the Trainer; none needs torch."""


def check_options(precision: "Precision | None", compile: object, prepares: bool) -> None:
    """Refuses float8 without a preparation, and to compile what a preparation compiles."""
    if precision == "amp_fp8" and not prepares:
        raise ParallelismValueError(
            "precision='amp_fp8' needs a parallelism_config, such as 'fsdp': preparation converts the layers."
        )
    if compile and prepares:
        raise ParallelismValueError(
            "Pass ParallelismConfig(compile=...) instead, which compiles the blocks between collectives."
        )
    if not isinstance(compile, bool | Mapping):
        raise ParallelismTypeError(f"compile is True or torch.compile's options, not {compile!r}.")
