"""Evaluation and prediction: on which data, how often, and the forward passes without gradients.

All ranks take the same number of batches, whatever their dataloaders hold.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from composer_dist.distributed.context_parallelism.attention import attention_of_each_rank
from composer_dist.distributed.prepared import mesh_of
from composer_dist.distributed.ranks import process_group
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.distributed.sharding.hooks import stay_gathered
from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.models.metric_states import count_on, equally_long
from composer_dist.precision import autocast
from composer_dist.structure.calling import whole
from composer_dist.structure.kept import evaluating
from composer_dist.tensors.nested import map_tensors
from composer_dist.trainer.clock import Time
from composer_dist.trainer.data.batch import num_samples, to_device
from composer_dist.trainer.data.feed import Fed, Feed, Size
from composer_dist.trainer.events import Event, Every
from composer_dist.trainer.logger import Logger
from composer_dist.trainer.state import State
from composer_dist.trainer.step import measure, total_loss

if TYPE_CHECKING:
    from torchmetrics import Metric

    from composer_dist.composer_model import ComposerModel


RunEvent = Callable[[Event], None]


def evaluate(
    state: State, evaluator: Evaluator, logger: Logger, run_event: RunEvent, with_loss: bool
) -> dict[str, float]:
    """Logs the mean loss and the metrics over a dataloader of all ranks; equal on every rank.

    The results are called `loss/<label>/total`, with `with_loss`, and `metrics/<label>/<metric>`.
    """
    label = evaluator.label
    feed = Feed(evaluator.batches, label, partial(measure, state))
    metrics = fresh_metrics(state, evaluator.chosen(state.model.get_metrics(is_train=False)), ("cp", "tp"))
    state.eval_metrics[label] = metrics
    total, weight = torch.zeros((), device=state.device), 0.0
    with _reading(state, feed, label, only_loss=not metrics):
        with stay_gathered(state.model):
            for fed in _batches(state, feed, "eval", run_event):
                with autocast(state.precision, state.device):
                    outputs = state.model(state.batch)
                    state.outputs = state.model.eval_forward(state.batch, outputs)
                    if with_loss and fed.weight:
                        loss = total_loss(state.model.loss(outputs, state.batch))
                        total += loss * fed.weight
                        weight += fed.weight
                run_event(Event.EVAL_AFTER_FORWARD)
                if not fed.filler:
                    for metric in metrics.values():
                        state.model.update_metric(state.batch, state.outputs, metric)
        results = compute_metrics(metrics, label)
        if with_loss:
            sums = process_group.all_reduce([float(total), weight], "sum")
            results = {f"loss/{label}/total": sums[0] / (sums[1] or float("nan"))} | results
        logger.log_metrics(results)
        run_event(Event.EVAL_END)
    return results


def predict(state: State, dataloader: Iterable[Any], run_event: RunEvent, keep: bool) -> list[Any]:
    """What `eval_forward` gives for each batch of this rank's dataloader, on the CPU."""
    feed = Feed(dataloader, "predict", lambda batch: Size(samples=num_samples(batch)))
    kept: list[Any] = []
    with _reading(state, feed, "predict"):
        with stay_gathered(state.model):
            for fed in _batches(state, feed, "predict", run_event):
                with autocast(state.precision, state.device):
                    state.outputs = state.model.eval_forward(state.batch)
                run_event(Event.PREDICT_AFTER_FORWARD)
                if keep and not fed.filler:
                    kept.append(map_tensors(lambda _, tensor: whole(tensor).cpu(), state.outputs))
        run_event(Event.PREDICT_END)
    return kept


def _batches(state: State, feed: Feed, kind: str, run_event: RunEvent) -> Iterator[Fed]:
    """The batches of a pass, each in `state.batch`, with the events before and after them."""
    run_event(Event(f"{kind}_start"))
    while (fed := feed.next()) is not None:
        state.dataloader_len = feed.length
        state.batch = to_device(fed.batch, state.device)
        run_event(Event(f"{kind}_batch_start"))
        run_event(Event(f"{kind}_before_forward"))
        yield fed
        state.eval_batch += 1
        run_event(Event(f"{kind}_batch_end"))


def check_metrics(metrics: Mapping[str, Metric]) -> None:
    """Raises if some have no values to start from."""
    if empty := [name for name, metric in metrics.items() if _is_on_meta(metric)]:
        raise ParallelismValueError(
            "Metrics were made on the meta device (inside init_context), so they have no values to start "
            f"from: {', '.join(empty)}. Make them inside of `with torch.device('cpu'):`."
        )


def checked(evaluators: Sequence[Evaluator], model: ComposerModel) -> Sequence[Evaluator]:
    """The evaluators; raises on all ranks if the model lacks a metric, or one has no values to start from."""
    with Agreement().together("the metrics"):
        for one in evaluators:
            check_metrics(one.chosen(model.get_metrics(is_train=False)))
    return evaluators


def fresh_metrics(state: State, metrics: Mapping[str, Metric], sharing: Sequence[str]) -> dict[str, Metric]:
    """Empty copies on the state's device; the model's own stay as they are. Every rank calls it.

    Args:
        state: has the model, whose mesh decides which ranks count.
        metrics: by name.
        sharing: the dimensions of the mesh along which ranks see the same samples, which count once.
    """
    with Agreement().together("the metrics"):
        check_metrics(metrics)
    fresh = {name: copy.deepcopy(metric).to(state.device) for name, metric in metrics.items()}
    mesh = mesh_of(state.model)
    shared = mesh is not None and any(mesh.sizes[name] > 1 for name in sharing)
    ranks = mesh.first_along(*sharing) if mesh is not None and shared else None
    for metric in fresh.values():
        metric.reset()
        count_on(metric, ranks)
    return fresh


def _is_on_meta(metric: Metric) -> bool:
    starts = (start for one in metric.modules() for start in getattr(one, "_defaults", {}).values())
    return any(isinstance(start, Tensor) and start.is_meta for start in starts)


def compute_metrics(metrics: Mapping[str, Metric], label: str) -> dict[str, float]:
    """The metrics' values over all ranks; one that gives several has several names."""
    values: dict[str, float] = {}
    for name, metric in metrics.items():
        with warnings.catch_warnings():
            # A rank may have had fillers only; the other ranks' counts make the result.
            warnings.filterwarnings("ignore", "The ``compute`` method of metric", UserWarning)
            with equally_long(metric):
                values |= _flatten(f"metrics/{label}/{name}", metric.compute())
    return values


def _flatten(name: str, value: Any) -> dict[str, float]:
    if isinstance(value, Mapping):
        items = [(f"{name}/{key}", item) for key, item in value.items()]
    elif isinstance(value, list | tuple) or (isinstance(value, Tensor) and value.numel() != 1):
        items = [(f"{name}/{index}", item) for index, item in enumerate(value)]
    else:
        return {name: float(value)}
    return {key: number for item in items for key, number in _flatten(*item).items()}


@contextmanager
def _reading(state: State, feed: Feed, label: str, only_loss: bool = False) -> Iterator[None]:
    """Evaluation mode, no gradients; afterwards modules and state are as they were."""
    place = state.dataloader, state.dataloader_label, state.dataloader_len
    training = state.batch, state.outputs
    state.dataloader, state.dataloader_label, state.dataloader_len = feed.dataloader, label, None
    state.eval_batch = 0
    state.model.only_loss = only_loss
    try:
        # A callback may evaluate while this rank trains on its part of a sequence.
        with evaluating(state.model), attention_of_each_rank():
            yield
    finally:
        state.dataloader, state.dataloader_label, state.dataloader_len = place
        state.batch, state.outputs = training
        state.model.only_loss = False


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
        if self.interval is not None:
            Time.positive(f"{self.label}: interval", self.interval)

    def limited(self, subset: int | None) -> Evaluator:
        """With this subset, unless it has one."""
        return replace(self, subset=subset) if self.subset is None else self

    @property
    def batches(self) -> Iterable[Any]:
        """The dataloader, or its first `subset` batches."""
        return self.dataloader if self.subset is None else _First(self.dataloader, self.subset)

    def chosen(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the model's metrics that count here."""
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
    """
    if given is None:
        return []
    if isinstance(given, Evaluator):
        return [given]
    if isinstance(given, Mapping):
        if not given:
            raise ParallelismValueError("eval_dataloader is an empty mapping.")
        return [
            replace(one, label=name) if isinstance(one, Evaluator) else Evaluator(name, one)
            for name, one in given.items()
        ]
    if isinstance(given, Sequence) and any(isinstance(one, Evaluator | DataLoader) for one in given):
        if strangers := [one for one in given if not isinstance(one, Evaluator)]:
            raise ParallelismTypeError(
                "Several dataloaders need labels: pass a mapping from label to dataloader, or Evaluators; "
                f"there is a {type(strangers[0]).__name__} without one."
            )
        labels = [one.label for one in given]
        if twice := {one for one in labels if labels.count(one) > 1}:
            raise ParallelismValueError(f"Two Evaluators are called {', '.join(sorted(twice))!r}.")
        return list(given)
    return [Evaluator(label, given)]


class Timetable:
    """When `fit` evaluates, and on which data; `interval` is for evaluators without one of their own."""

    def __init__(self, evaluators: Sequence[Evaluator], interval: Time | None) -> None:
        own = [(one, interval if one.interval is None else one.interval) for one in evaluators]
        self._entries = [(one, Every(one.label, time)) for one, time in own if time is not None]
        self.evaluated: dict[str, int] = {}
        """By label, the batch after which `fit` last evaluated."""

    def start(self, state: State) -> None:
        """Counts the intervals from here."""
        state.eval_labels = tuple(one.label for one, _ in self._entries)
        for _, every in self._entries:
            every.start(state)

    def due(self, state: State) -> list[Evaluator]:
        """What to evaluate on now, because its interval has passed."""
        return self._once([one for one, every in self._entries if every.passed(state)], state)

    def last(self, state: State) -> list[Evaluator]:
        """What to evaluate on at the end of the fit."""
        return self._once([one for one, _ in self._entries], state)

    def _once(self, evaluators: Sequence[Evaluator], state: State) -> list[Evaluator]:
        """Leaves out those that were evaluated on after this very batch."""
        now = state.timestamp.batch
        due = [one for one in evaluators if self.evaluated.get(one.label) != now]
        self.evaluated |= {one.label: now for one in due}
        return due


@dataclass(frozen=True)
class _First:
    """The first batches of a dataloader."""

    dataloader: Iterable[Any]
    count: int

    def __iter__(self) -> Iterator[Any]:
        return islice(self.dataloader, self.count)

    def __len__(self) -> int:
        return min(len(self.dataloader), self.count)  # type: ignore[arg-type]  # asked where it has one
