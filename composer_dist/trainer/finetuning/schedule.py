"""The phases of fine-tuning, as Python objects and as YAML files."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import yaml
from torch import nn

from composer_dist.config.base import FromDict
from composer_dist.config.yaml import parse
from composer_dist.distributed.prepared import named_parameters_canonical
from composer_dist.errors import Faults, ParallelismTypeError, ParallelismValueError
from composer_dist.trainer.clock import Time

REST = "rest"
"""Means every parameter that no phase names."""


@dataclass(frozen=True, kw_only=True)
class NoImprovement(FromDict):
    """The end of a phase: a metric has stopped improving."""

    metric: str
    """The name in the logs: `"loss/eval/total"`, `"metrics/eval/MulticlassAccuracy"`."""
    patience: int = 1
    """How many measurements in a row without improvement end the phase. A metric is measured at each
    evaluation, a metric of training (`"loss/train/total"`) at the end of each epoch."""
    mode: Literal["min", "max"] | None = None
    """Whether smaller or larger values are better; None means "min" for a loss and is an error for others."""
    min_delta: float = 0.0
    """How much better than the best value an improvement must be."""
    at_most: Time | str | None = None
    """The longest time that the phase lasts, even if the metric still improves."""

    def __post_init__(self) -> None:
        with Faults("NoImprovement: ", ".", "; ") as faults:
            if isinstance(self.patience, bool) or not isinstance(self.patience, int) or self.patience < 1:
                faults.append(f"patience is a positive number of measurements, not {self.patience!r}")
            if self.mode not in ("min", "max", None):
                faults.append(f"mode is 'min' or 'max', not {self.mode!r}")
            if self.mode is None and not self.metric.startswith("loss/"):
                faults.append(f"mode is missing: 'max' if a greater {self.metric} is better, else 'min'")
            if not 0 <= self.min_delta < math.inf:
                faults.append(f"min_delta is a number from 0, not {self.min_delta!r}")
        object.__setattr__(self, "mode", self.mode or "min")
        if self.at_most is not None:
            object.__setattr__(self, "at_most", _duration(self.at_most))

    def to_dict(self) -> dict[str, Any]:
        """In plain types, what differs from the defaults."""
        values = {"metric": self.metric, "patience": self.patience, "mode": self.mode}
        values |= {"min_delta": self.min_delta} if self.min_delta else {}
        return values | ({"at_most": str(self.at_most)} if self.at_most is not None else {})


@dataclass(frozen=True)
class Phase(FromDict):
    """A part of fine-tuning: which parameters join those already trained, and for how long."""

    foreign_keys: ClassVar[Mapping[str, str]] = {
        "max_transition_epoch": " Here it is until, such as '2ep', or at_most of a NoImprovement.",
        "new_optimizer": " One optimizer trains all phases.",
        "new_lr_scheduler": " One scheduler is for all phases; lr is the rate of a phase's own parameters.",
        "monitor": " It belongs in until: {metric: loss/eval/total, patience: 2}.",
        "patience": " It belongs in until: {metric: loss/eval/total, patience: 2}.",
    }
    """The Fine-Tuning Scheduler's."""
    params: str | Sequence[str]
    """Names of parameters or of modules, `"re:..."` patterns that match a whole name of either, or
    `"rest"`: all that no phase names."""
    lr: float | None = None
    """The learning rate of these parameters; None means the rate of their group in the optimizer."""
    until: Time | str | NoImprovement | None = None
    """How long the phase lasts: a time from its start, such as "2ep" or "500ba", or `NoImprovement`. The last
    phase needs none; if it has one, training ends with it."""

    def __post_init__(self) -> None:
        params = (self.params,) if isinstance(self.params, str) else tuple(self.params)
        with Faults(after=".", between="; ") as faults:
            if not params or not all(isinstance(name, str) and name for name in params):
                faults.append("params needs names, 're:...' patterns or 'rest'")
            number = isinstance(self.lr, int | float) and not isinstance(self.lr, bool)
            if self.lr is not None and not (number and 0 < self.lr < math.inf):
                faults.append(f"lr is a positive number, not {self.lr!r}")
        object.__setattr__(self, "params", params)
        if isinstance(self.until, Time | str):
            object.__setattr__(self, "until", _duration(self.until))
        elif not isinstance(self.until, NoImprovement | None):
            raise ParallelismTypeError(f"until is a time or NoImprovement, not {self.until!r}.")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """A phase from a dictionary, in which `until` may be a dictionary of `NoImprovement`.

        Raises:
            ParallelismValueError: an unknown key (with its nearest neighbor) or a wrong value.
        """
        if isinstance(until := values.get("until"), Mapping):
            values = {**values, "until": NoImprovement.from_dict(until)}
        return super().from_dict(values)

    def to_dict(self) -> dict[str, Any]:
        """In plain types, what differs from the defaults."""
        values: dict[str, Any] = {"params": self.params[0] if len(self.params) == 1 else list(self.params)}
        values |= {"lr": self.lr} if self.lr is not None else {}
        if isinstance(self.until, NoImprovement):
            return values | {"until": self.until.to_dict()}
        return values | ({"until": str(self.until)} if self.until is not None else {})


PhaseSchedule = Sequence[Phase | Mapping[str, Any]] | Mapping[int, Phase | Mapping[str, Any]] | str | Path
"""Phases in order, or by their numbers from 0, or the path of a YAML file with either."""


def phases_of(schedule: PhaseSchedule) -> tuple[Phase, ...]:
    """The phases of a schedule in any form, after the checks that need no model.

    Raises:
        ParallelismValueError: everything that is wrong: numbers other than 0, 1, 2, ..., unknown keys, bad
            learning rates, times or patience, a phase that would never end.
    """
    if isinstance(schedule, str | Path):
        return load_schedule(schedule)
    if isinstance(schedule, Mapping):
        if sorted(schedule, key=str) != sorted(range(len(schedule)), key=str):
            raise ParallelismValueError(
                f"The phases are numbered {', '.join(map(str, schedule))}; number them from 0 without gaps."
            )
        schedule = [schedule[number] for number in range(len(schedule))]
    phases: list[Phase] = []
    with Faults() as faults:
        if not schedule:
            faults.append("A schedule needs at least one phase.")
        for number, given in enumerate(schedule):
            with faults.catching(before=f"phase {number}: "):
                if not isinstance(given, Phase | Mapping):
                    raise ParallelismTypeError(f"expected params, lr and until, not {given!r}.")
                phases.append(given if isinstance(given, Phase) else Phase.from_dict(given))
                if phases[-1].until is None and number < len(schedule) - 1:
                    faults.append(f"phase {number} has no 'until', so phase {number + 1} would never begin.")
    return tuple(phases)


def default_phases(model: nn.Module, *, until: Time | str | NoImprovement = "1ep") -> list[Phase]:
    """A schedule that trains a model from its output to its input, with two more parameters in each phase.

    The two are mostly a layer's weight and bias. If the number is odd, the model's first parameter is
    alone in the last phase. Only parameters that are trainable now take part.

    Args:
        model: prepared or not.
        until: how long each phase except the last one lasts.

    Raises:
        ParallelismValueError: the model has no trainable parameter.
    """
    names = [name for name, p in named_parameters_canonical(model) if p.requires_grad][::-1]
    if not names:
        raise ParallelismValueError("The model has no trainable parameter to schedule.")
    pairs = [names[first : first + 2] for first in range(0, len(names), 2)]
    return [Phase(pair, until=until) for pair in pairs[:-1]] + [Phase(pairs[-1])]


def dump_schedule(schedule: PhaseSchedule, path: str | Path) -> None:
    """Writes phases as a YAML file, to edit and to read back with `load_schedule`."""
    values = [phase.to_dict() for phase in phases_of(schedule)]
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(yaml.safe_dump(values, sort_keys=False, width=100), "utf-8")


def load_schedule(path: str | Path) -> tuple[Phase, ...]:
    """The phases of a YAML file: a list of phases, or a mapping of numbers to phases.

    Raises:
        ParallelismValueError: as `phases_of`, or a duplicate key, invalid YAML, no file; names the file.
    """
    try:
        found = parse(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise ParallelismValueError(f"{path}: {reason}.") from None
    with Faults() as faults:
        faults += (f"{path}{f':{line}' if line else ''}: {text}" for _, line, text in found.faults)
    if not isinstance(found.values, list | Mapping):
        raise ParallelismValueError(f"{path}: a schedule is a list of phases or a mapping by number.")
    try:
        return phases_of(found.values)
    except ParallelismValueError as error:
        raise ParallelismValueError(f"{path}: {error}") from None


def _duration(time: Time | str) -> Time:
    time = Time.of(time, unit=None)
    if not time.value > 0:
        raise ParallelismValueError(f"until must be a positive time, not '{time}'.")
    return time
