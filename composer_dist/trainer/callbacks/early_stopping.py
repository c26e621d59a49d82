"""Ends a run that has stopped improving."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.trainer.callbacks.base import Callback
from composer_dist.trainer.clock import Time
from composer_dist.trainer.improvement import (
    Improvement,
    Mode,
    check_measured,
    measured_on,
    mode_of,
    no_such_metric,
)
from composer_dist.trainer.logger import Logger
from composer_dist.trainer.state import State

_log = logging.getLogger("composer_dist")


class EarlyStopping(Callback):
    """Stops training, on every rank, once a metric has not improved for long enough.

    A metric of an evaluation is checked after each evaluation, one of training (`loss/train/...`,
    `metrics/train/...`) or of any other kind at the end of each epoch.

    Args:
        monitor: the metric's name, such as "loss/eval/total" or "metrics/eval/MulticlassAccuracy".
        patience: stop after this many checks in a row without improvement (an integer), or this much time
            since the last improvement, such as "2ep" or "500ba".
        min_delta: a smaller change is not an improvement.
        mode: whether "min" or "max" is good; None: "min" for a loss, an error or a perplexity.

    Raises:
        ParallelismValueError: patience is not positive, min_delta is negative, or there is no such mode.
        ParallelismTypeError: patience is neither a count nor a time.
        ParallelismKeyError: during the run, on every rank: there is no such metric.
    """

    def __init__(
        self, monitor: str, patience: int | Time | str = 1, min_delta: float = 0.0, mode: Mode | None = None
    ) -> None:
        if isinstance(patience, bool) or not isinstance(patience, int | Time | str):
            raise ParallelismTypeError(f"patience must be a count or a time such as '2ep', not {patience!r}.")
        self._patience = patience if isinstance(patience, int) else Time.of(patience)
        count = patience if isinstance(patience, int) else Time.of(patience).value
        if count <= 0 or min_delta < 0:
            raise ParallelismValueError(
                f"patience must be positive and min_delta not negative, not {patience!r} and {min_delta}."
            )
        self._monitor, self._label = monitor, measured_on(monitor)
        self._mode = mode_of(monitor, mode)
        self._min_delta = min_delta
        self._improvement = Improvement()
        self._is_new = False
        self._has_stopped = False
        self._was_stopped = False
        """Whether the run had been stopped when the checkpoint was saved from which it resumes."""

    @property
    def best(self) -> float | None:
        """The best value so far."""
        return self._improvement.best

    def fit_start(self, state: State, logger: Logger) -> None:
        """Stops a run again that resumes after it was stopped, unless its patience is longer now."""
        check_measured("EarlyStopping", self._monitor, state)
        again = self._was_stopped and self._improvement.has_stopped(self._patience, state)
        self._has_stopped, self._was_stopped = again, False
        if again:
            state.stop_training()
            if state.rank == 0:
                _log.warning(
                    "EarlyStopping had already stopped the run because of %s, so this fit trains nothing. To "
                    "continue training, raise its patience or remove it.",
                    self._monitor,
                )

    def eval_end(self, state: State, logger: Logger) -> None:
        self._is_new = self._is_new or state.dataloader_label == self._label

    def eval_after_all(self, state: State, logger: Logger) -> None:
        """Checks an evaluation's metric, if the evaluation is part of a fit."""
        if self._is_new and state.dataloader_label == "train":
            self._check(state)
        self._is_new = False

    def epoch_end(self, state: State, logger: Logger) -> None:
        if self._label is None:
            self._check(state)

    def fit_end(self, state: State, logger: Logger) -> None:
        if self.best is None and self._monitor not in state.metric_values:
            raise no_such_metric("EarlyStopping", self._monitor, state)

    def state_dict(self) -> dict[str, Any]:
        return self._improvement.state_dict() | {"stopped": self._has_stopped, "monitor": self._monitor}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        state = dict(state)
        if (other := state.pop("monitor", self._monitor)) != self._monitor:
            _log.warning("EarlyStopping of %s starts over: the saved one is of %s.", self._monitor, other)
            return
        self._was_stopped = state.pop("stopped", False)  # checkpoints of earlier versions have neither
        self._improvement = Improvement.from_state_dict(state)

    def _check(self, state: State) -> None:
        if self._monitor not in state.metric_values:
            raise no_such_metric("EarlyStopping", self._monitor, state)
        value = float(state.metric_values[self._monitor])
        better = self._improvement.add(value, state.timestamp, self._mode, self._min_delta)
        if not better and self._improvement.has_stopped(self._patience, state):
            self._has_stopped = True
            state.stop_training()


class EarlyStopper(EarlyStopping):
    """`EarlyStopping` as Composer spells it.

    Args:
        monitor: the metric's name without its dataloader: a class such as "MulticlassAccuracy", or "loss".
        dataloader_label: the dataloader's label, "train" for training.
        comp: `torch.less` or `torch.greater`, what a better value is compared with the best one; None as
            `mode=None`.
        min_delta: a smaller change is not an improvement.
        patience: as of `EarlyStopping`.

    Raises:
        ParallelismValueError: `comp` is another function; and what `EarlyStopping` raises.
    """

    def __init__(
        self,
        monitor: str,
        dataloader_label: str,
        comp: Callable[..., Any] | None = None,
        min_delta: float = 0.0,
        patience: int | Time | str = 1,
    ) -> None:
        modes: dict[Any, Mode | None] = {None: None, torch.less: "min", torch.greater: "max"}
        if comp not in modes:
            raise ParallelismValueError(f"comp must be torch.less or torch.greater, not {comp!r}.")
        name = f"metrics/{dataloader_label}/{monitor}"
        if monitor.partition("/")[0] == "loss":
            name = f"loss/{dataloader_label}/total"
        super().__init__(name, patience, min_delta, modes[comp])
