"""What to evaluate on, by which name, and how often."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.trainer.every import Every
from composer_dist.trainer.time import Time


@dataclass(frozen=True)
class Evaluator:
    """A dataloader of held-out data."""

    label: str
    """What its results are called by: `loss/<label>/total`."""
    dataloader: Iterable[Any]
    """Gives this rank's batches."""
    metrics: Sequence[str] | None = None
    """The names of those of the model's metrics that count here; None means all."""
    interval: Time | str | int | None = None
    """How often `fit` evaluates on it; None takes the Trainer's `eval_interval`. An integer means epochs."""
    subset: int | None = None
    """The most batches per rank to evaluate on."""

    def __post_init__(self) -> None:
        if not self.label or "/" in self.label or self.label in ("train", "predict"):
            raise ParallelismValueError(
                f"An Evaluator's label is a word other than 'train' and 'predict', without '/', not "
                f"{self.label!r}."
            )
        if self.subset is not None and self.subset < 1:
            raise ParallelismValueError(f"{self.label}: subset must be positive, not {self.subset}.")
        if self.interval is not None and not Time.of(self.interval).value > 0:
            raise ParallelismValueError(f"{self.label}: interval must be positive, not '{self.interval}'.")

    @property
    def batches(self) -> Iterable[Any]:
        """The dataloader, or its first `subset` batches."""
        return self.dataloader if self.subset is None else _First(self.dataloader, self.subset)

    def chosen(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the model's metrics that count here.

        Raises:
            ParallelismValueError: the model has no such metric.
        """
        if self.metrics is None:
            return dict(metrics)
        if unknown := [name for name in self.metrics if name not in metrics]:
            raise ParallelismValueError(
                f"{self.label}: the model has no metric {', '.join(unknown)}; it has "
                f"{', '.join(metrics) or 'none'}."
            )
        return {name: metrics[name] for name in self.metrics}


def as_evaluators(given: Any, label: str = "eval") -> list[Evaluator]:
    """Evaluators from whatever the Trainer takes: one dataloader or Evaluator, or several.

    Several dataloaders are a mapping by label; several Evaluators a sequence. Any other iterable is one
    dataloader, called `label`.

    Raises:
        ParallelismTypeError: a sequence of dataloaders, which have no labels.
        ParallelismValueError: two of one label; an empty mapping.
    """
    if given is None:
        return []
    if isinstance(given, Evaluator):
        return [given]
    if isinstance(given, Mapping):
        if not given:
            raise ParallelismValueError("eval_dataloader is an empty mapping.")
        return [_labelled(name, one) for name, one in given.items()]
    if isinstance(given, Sequence) and any(isinstance(one, Evaluator | DataLoader) for one in given):
        if strangers := [one for one in given if not isinstance(one, Evaluator)]:
            raise ParallelismTypeError(
                f"Several dataloaders need labels: pass a mapping from label to dataloader, or Evaluators; "
                f"there is a {type(strangers[0]).__name__} without one."
            )
        labels = [one.label for one in given]
        if twice := {one for one in labels if labels.count(one) > 1}:
            raise ParallelismValueError(f"Two Evaluators are called {', '.join(sorted(twice))!r}.")
        return list(given)
    return [Evaluator(label, given)]


def timetable(evaluators: Sequence[Evaluator], interval: Time | None) -> list[tuple[Evaluator, Every]]:
    """When `fit` evaluates on which; those without an interval where `interval` is None it leaves out."""
    own = [(one, interval if one.interval is None else Time.of(one.interval)) for one in evaluators]
    return [(one, Every(one.label, time)) for one, time in own if time is not None]


def _labelled(label: str, given: Any) -> Evaluator:
    if isinstance(given, Evaluator):
        return replace(given, label=label)
    return Evaluator(label, given)


@dataclass(frozen=True)
class _First:
    """The first batches of a dataloader."""

    dataloader: Iterable[Any]
    count: int

    def __iter__(self) -> Iterator[Any]:
        return islice(self.dataloader, self.count)

    def __len__(self) -> int:
        return min(len(self.dataloader), self.count)  # type: ignore[arg-type]  # asked where it has one
