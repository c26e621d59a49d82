"""The state of a run; the Trainer writes it, callbacks read it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from composer_dist.composer_model import ComposerModel
from composer_dist.precision import Precision
from composer_dist.trainer.clock import Time, Timestamp, TimeUnit, check_keys, end_of_fit
from composer_dist.trainer.scaling import LossScaler
from composer_dist.trainer.speed.throughput import Throughput

if TYPE_CHECKING:
    from torchmetrics import Metric

WEIGHTS_ONLY = "weights_only"
"""The key that marks a checkpoint without optimizers."""


@dataclass(kw_only=True)
class State:
    """What callbacks can read at any event."""

    model: ComposerModel
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    optimizers: Sequence[Optimizer] = ()
    schedulers: Sequence[LRScheduler] = ()
    precision: Precision | None = None
    rank: int = 0
    world_size: int = 1

    device_train_microbatch_size: int | None = None
    """The most samples in a microbatch; None means whole batches, or not yet found by "auto"."""

    loss_scaler: LossScaler | None = None
    """Under amp_fp16: keeps gradients from vanishing."""

    max_duration: Time | None = None
    """Where the current `fit` ends, counted from the start of the run."""
    _planned: Time | None = field(default=None, init=False)
    """Where the training ends, if no `fit` goes beyond it."""
    timestamp: Timestamp = field(default_factory=Timestamp)
    next_timestamp: Timestamp = field(default_factory=Timestamp)
    """The time at the end of the current training batch."""
    fit_start: Timestamp = field(default_factory=Timestamp)
    """Where the current `fit` began."""
    restored: int = 0
    """How often earlier weights were restored, which changes the model without a batch."""
    throughput: Throughput = field(default_factory=Throughput)

    train_dataloader: Iterable[Any] | None = None
    train_length: int | None = None
    """Batches in an epoch: the most that any rank has, where all know it."""
    dataloader: Iterable[Any] | None = None
    """The one that is being read."""
    dataloader_label: str | None = None
    """`"train"`, `"eval"`, `"predict"`, or None between runs."""
    dataloader_len: int | None = None
    """Its number of batches, likewise."""
    eval_labels: tuple[str, ...] = ()
    """Of the data on which the current `fit` evaluates."""
    eval_batch: int = 0
    """Batches done of the current evaluation or prediction."""

    batch: Any = None
    """This rank's batch; between BEFORE_FORWARD and AFTER_BACKWARD its current microbatch."""
    outputs: Any = None
    """What the model made of it; until BEFORE_BACKWARD, for logits may be large."""
    loss: torch.Tensor | None = None
    """The microbatch's loss; from AFTER_TRAIN_BATCH the mean over the batches of all ranks."""
    train_metrics: dict[str, Metric] = field(default_factory=dict)
    eval_metrics: dict[str, dict[str, Metric]] = field(default_factory=dict)
    """By dataloader label and name."""
    metric_values: dict[str, float | torch.Tensor] = field(default_factory=dict)
    """The last value of everything that was logged, by name, equal on all ranks."""
    stop_requested: bool = False
    alarmed: bool = False
    """Whether any rank raised the alarm before this batch: equal on all ranks."""
    _alarm_raised: bool = field(default=False, init=False)
    remember: Callable[[], dict[str, Any]] = dict
    """What a checkpoint holds besides model and optimizers, by key; every rank must ask."""
    settings: dict[str, str] = field(default_factory=dict)
    """What the run was started with, by name; checkpoints record it, and resuming compares it."""
    weights_only: str | None = None
    """The checkpoint with which the run has resumed, if that has no states of the optimizers."""
    averages: dict[str, torch.Tensor] = field(default_factory=dict)
    """The weights' moving averages by parameter name, if an EMA keeps any; sharded like the weights."""

    def stop_training(self) -> None:
        """Ends the run before the next batch, on every rank, if any rank asks."""
        self.stop_requested = True

    def raise_alarm(self) -> None:
        """Sets `alarmed` on all ranks in the next batch: something on this rank needs all of them."""
        self._alarm_raised = True

    def take_alarm(self) -> bool:
        """Whether this rank has raised the alarm since the last call."""
        raised, self._alarm_raised = self._alarm_raised, False
        return raised

    def state_dict(self) -> dict[str, Any]:
        """What a later process needs to resume: plain values only."""
        return {"timestamp": self.timestamp.state_dict(), "train_length": self.train_length}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads what `state_dict` returned.

        Raises:
            ParallelismValueError: it is not such a state.
        """
        check_keys("Trainer", state, ("timestamp", "train_length"))
        self.timestamp = Timestamp.from_state_dict(state["timestamp"])
        self.train_length = state["train_length"]

    def optimized_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that the optimizers hold: the shards."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]

    def plan_fit(self, planned: Time | None, duration: Time | None) -> None:
        """Sets where a `fit` of `duration` ends, and what its schedules count to; see `end_of_fit`."""
        self.max_duration = end_of_fit(self.timestamp, planned, duration)
        within = planned is not None and not self.timestamp.reached(planned)
        self._planned = planned if within else self.max_duration

    @property
    def schedule_end(self) -> Time | None:
        """What schedules count `dur` to: the Trainer's `max_duration`, or the end of a `fit` beyond it.

        If their units cannot be converted, it is the Trainer's `max_duration`.
        """
        end, planned = self.max_duration, self._planned
        if end is None or planned is None:
            return planned
        end_here, planned_here = self._in_batches(end), self._in_batches(planned)
        is_beyond = end_here.unit is planned_here.unit and end_here > planned_here
        return end if is_beyond else planned

    def _in_batches(self, time: Time) -> Time:
        """A time in epochs in batches, if an epoch's length is known."""
        if time.unit is not TimeUnit.EPOCH or not self.train_length:
            return time
        return Time(time.value * self.train_length, TimeUnit.BATCH)

    @property
    def finished(self) -> bool:
        """Whether the current `fit` has come to its end."""
        return self.max_duration is not None and self.timestamp.reached(self.max_duration)

    def elapsed_duration(self, at: Timestamp | None = None) -> float | None:
        """The share of `max_duration` that has passed; within an epoch by its batches, if known."""
        if self.max_duration is None or not self.max_duration:
            return None
        return self.passed(self.max_duration.unit, at) / self.max_duration.value

    def passed(self, unit: TimeUnit, at: Timestamp | None = None) -> float:
        """The time that has passed; within an epoch by its batches, if known."""
        at = at or self.timestamp
        value: float = at.get(unit).value
        if unit is TimeUnit.EPOCH and self.train_length:
            value += min(at.batch_in_epoch / self.train_length, 1.0)
        return value

    def has_passed(self, time: Time, since: Timestamp) -> bool:
        """Whether at least `time` has passed since then."""
        if time.unit is TimeUnit.DURATION:
            now, then = self.elapsed_duration(), self.elapsed_duration(since)
            return now is not None and then is not None and now - then >= time.value - 1e-9
        return self.timestamp.get(time.unit) - since.get(time.unit) >= time

    def intervals(self, interval: Time, at: Timestamp | None = None) -> int:
        """How often `interval` has passed since the start of the run."""
        at = at or self.timestamp
        if interval.unit is TimeUnit.DURATION:
            value = self.elapsed_duration(at) or 0.0
        else:
            value = at.get(interval.unit).value
        return int(value / interval.value + 1e-9)  # 0.3 / 0.1 is 2.9999999999999996


def contents(state: State, run: bool = True, optimizers: bool = True) -> dict[str, Any]:
    """The contents of a checkpoint, by key; every rank must ask. Without `run`, model and optimizers."""
    found: dict[str, Any] = {"model": state.model}
    if optimizers:
        found |= {f"optimizer{index or ''}": one for index, one in enumerate(state.optimizers)}
    else:
        found[WEIGHTS_ONLY] = True
    return found | (state.remember() if run else {})
