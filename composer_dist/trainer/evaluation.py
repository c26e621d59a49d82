"""Evaluation and prediction: forward passes without gradients, in step on all ranks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from composer_dist.distributed import process_group
from composer_dist.distributed.agreement import Agreement
from composer_dist.errors import ParallelismValueError
from composer_dist.trainer.autocast import autocast
from composer_dist.trainer.batch import map_leaves, to_device
from composer_dist.trainer.evaluator import Evaluator
from composer_dist.trainer.events import Event
from composer_dist.trainer.feed import Feed
from composer_dist.trainer.state import State
from composer_dist.trainer.step import total_loss

if TYPE_CHECKING:
    from torchmetrics import Metric

    from composer_dist.trainer.loggers.logger import Logger

RunEvent = Callable[[Event], None]


def evaluate(
    state: State, feed: Feed, evaluator: Evaluator, logger: Logger, run_event: RunEvent, with_loss: bool
) -> dict[str, float]:
    """Logs the mean loss and the metrics over a dataloader of all ranks; equal on every rank.

    The results are called `loss/<label>/total`, with `with_loss`, and `metrics/<label>/<metric>`.
    """
    label = evaluator.label
    metrics = fresh_metrics(evaluator.chosen(state.model.get_metrics(is_train=False)), state.device)
    state.eval_metrics[label] = metrics
    total, weight = torch.zeros((), device=state.device), 0.0
    with _reading(state, feed, label):
        run_event(Event.EVAL_START)
        while (fed := feed.next()) is not None:
            state.dataloader_len = feed.length
            state.batch = to_device(fed.batch, state.device)
            run_event(Event.EVAL_BATCH_START)
            run_event(Event.EVAL_BEFORE_FORWARD)
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
            state.eval_batch += 1
            run_event(Event.EVAL_BATCH_END)
        results = compute_metrics(metrics, label)
        if with_loss:
            sums = process_group.all_reduce([float(total), weight], "sum")
            results = {f"loss/{label}/total": sums[0] / (sums[1] or float("nan"))} | results
        logger.log_metrics(results)
        run_event(Event.EVAL_END)
    return results


def predict(state: State, feed: Feed, run_event: RunEvent, keep: bool) -> list[Any]:
    """What `eval_forward` gives for each batch of this rank's dataloader, on the CPU."""
    kept: list[Any] = []
    with _reading(state, feed, "predict"):
        run_event(Event.PREDICT_START)
        while (fed := feed.next()) is not None:
            state.dataloader_len = feed.length
            state.batch = to_device(fed.batch, state.device)
            run_event(Event.PREDICT_BATCH_START)
            run_event(Event.PREDICT_BEFORE_FORWARD)
            with autocast(state.precision, state.device):
                state.outputs = state.model.eval_forward(state.batch)
            run_event(Event.PREDICT_AFTER_FORWARD)
            if keep and not fed.filler:
                kept.append(map_leaves(_to_cpu, state.outputs))
            state.eval_batch += 1
            run_event(Event.PREDICT_BATCH_END)
        run_event(Event.PREDICT_END)
    return kept


def fresh_metrics(metrics: Mapping[str, Metric], device: torch.device) -> dict[str, Metric]:
    """Empty copies on `device`; the model's own stay as they are. Every rank calls it.

    Raises:
        ParallelismValueError: metrics that some rank made on the meta device, which have no start values.
    """
    with Agreement().together("the metrics"):
        empty = [name for name, metric in metrics.items() if _is_on_meta(metric)]
        if empty:
            raise ParallelismValueError(
                f"The metrics {', '.join(empty)} were made on the meta device (inside init_context), so they "
                "have no values to start from. Make them outside of it."
            )
    fresh = {name: copy.deepcopy(metric).to(device) for name, metric in metrics.items()}
    for metric in fresh.values():
        metric.reset()
    return fresh


def _is_on_meta(metric: Metric) -> bool:
    return any(isinstance(start, Tensor) and start.is_meta for start in metric._defaults.values())


def compute_metrics(metrics: Mapping[str, Metric], label: str) -> dict[str, float]:
    """The metrics' values over all ranks; one that gives several has several names."""
    values: dict[str, float] = {}
    for name, metric in metrics.items():
        with warnings.catch_warnings():
            # A rank may have had fillers only; the other ranks' counts make the result.
            warnings.filterwarnings("ignore", "The ``compute`` method of metric", UserWarning)
            values |= _flatten(f"metrics/{label}/{name}", metric.compute())
    return values


def _flatten(name: str, value: Any) -> dict[str, float]:
    if isinstance(value, Mapping):
        items = [(f"{name}/{key}", item) for key, item in value.items()]
    elif isinstance(value, Tensor) and value.numel() != 1:
        items = [(f"{name}/{index}", item) for index, item in enumerate(value)]
    else:
        return {name: float(value)}
    return {key: number for item in items for key, number in _flatten(*item).items()}


@contextmanager
def _reading(state: State, feed: Feed, label: str) -> Iterator[None]:
    """Evaluation mode, no gradients; afterwards the modules' modes and the state's place return."""
    modes = {module: module.training for module in state.model.modules()}
    place = state.dataloader, state.dataloader_label, state.dataloader_len
    state.dataloader, state.dataloader_label, state.dataloader_len = feed.dataloader, label, None
    state.eval_batch = 0
    state.model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        _restore(modes)
        state.dataloader, state.dataloader_label, state.dataloader_len = place
        state.batch = state.outputs = None


def _restore(modes: Mapping[nn.Module, bool]) -> None:
    for module, training in modes.items():
        module.training = training


def _to_cpu(leaf: Any) -> Any:
    return leaf.cpu() if isinstance(leaf, Tensor) else leaf
