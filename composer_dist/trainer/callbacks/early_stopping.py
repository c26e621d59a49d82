"""Ends a run that improves no more."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from composer_dist.errors import ParallelismKeyError, ParallelismTypeError, ParallelismValueError
from composer_dist.trainer.callbacks.base import Callback
from composer_dist.trainer.clock import Time, Timestamp
from composer_dist.trainer.logger import Logger
from composer_dist.trainer.state import State

_SMALL_IS_GOOD = ("loss", "error", "perplexity")


class EarlyStopping(Callback):
    """Stops training, on every rank, once a metric has not improved for long enough.

    The metric is looked at when it is new: one of an evaluation after that, one of training
    (`loss/train/...`, `metrics/train/...`) or of any other kind at the end of each epoch.

    Args:
        monitor: the metric's name, such as "loss/eval/total" or "metrics/eval/MulticlassAccuracy".
        patience: looks without improvement to bear (an integer), or time since the last improvement,
            such as "2ep" or "500ba"; reaching it stops.
        min_delta: a smaller change is no improvement.
        mode: whether "min" or "max" is good; None: "min" for a loss, an error or a perplexity.

    Raises:
        ParallelismValueError: patience is not positive, min_delta negative, or the mode another one.
        ParallelismTypeError: patience is neither a count nor a time.
        ParallelismKeyError: from the run, on every rank: there is no such metric.
    """

    def __init__(
        self,
        monitor: str,
        patience: int | Time | str = 1,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] | None = None,
    ) -> None:
        if isinstance(patience, bool) or not isinstance(patience, int | Time | str):
            raise ParallelismTypeError(f"patience must be a count or a time such as '2ep', not {patience!r}.")
        if mode not in ("min", "max", None):
            raise ParallelismValueError(f"mode must be 'min' or 'max', not {mode!r}.")
        self._monitor = monitor
        self._patience = patience if isinstance(patience, int) else Time.of(patience)
        count = patience if isinstance(patience, int) else Time.of(patience).value
        if count <= 0 or min_delta < 0:
            raise ParallelismValueError(
                f"patience must be positive and min_delta not negative, not {patience!r} and {min_delta}."
            )
        if mode is None:
            mode = "min" if any(word in monitor.lower() for word in _SMALL_IS_GOOD) else "max"
        self._sign = 1.0 if mode == "max" else -1.0
        self._min_delta = min_delta
        of_a_loader = monitor.startswith(("loss/", "metrics/"))
        self._label = monitor.split("/")[1] if of_a_loader else "train"
        self._is_new = False
        self.best: float | None = None
        """The best value so far."""
        self._best_at = Timestamp()
        self._waited = 0

    def eval_end(self, state: State, logger: Logger) -> None:
        """Notes whether the evaluation gave the metric."""
        self._is_new = self._is_new or state.dataloader_label == self._label

    def eval_after_all(self, state: State, logger: Logger) -> None:
        """Looks at an evaluation's metric, where the evaluation is part of a fit."""
        if self._is_new and state.dataloader_label == "train":
            self._look(state)
        self._is_new = False

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Looks at any other metric."""
        if self._label == "train":
            self._look(state)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Complains if the metric never came."""
        if self.best is None and self._monitor not in state.metric_values:
            self._refuse(state)

    def state_dict(self) -> dict[str, Any]:
        """The best value, when it came, and the looks since."""
        return {"best": self.best, "best_at": self._best_at.state_dict(), "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.best, self._waited = state["best"], state["waited"]
        self._best_at = Timestamp.from_state_dict(state["best_at"])

    def _look(self, state: State) -> None:
        if self._monitor not in state.metric_values:
            self._refuse(state)
        value = float(state.metric_values[self._monitor])
        if self._is_better(value):
            self.best, self._best_at, self._waited = value, state.timestamp, 0
            return
        self._waited += 1
        if isinstance(self._patience, int):
            over = self._waited >= self._patience
        else:
            over = _passed(state, self._best_at, self._patience)
        if over:
            state.stop_training()

    def _is_better(self, value: float) -> bool:
        if math.isnan(value):
            return False
        return self.best is None or self._sign * (value - self.best) > self._min_delta

    def _refuse(self, state: State) -> None:
        known = ", ".join(sorted(state.metric_values)) or "nothing yet"
        raise ParallelismKeyError(
            f"EarlyStopping monitors {self._monitor!r}, which is not logged; there is: {known}."
        )


def _passed(state: State, since: Timestamp, patience: Time) -> bool:
    if patience.unit == "dur":
        share = (state.elapsed_duration() or 0.0) - (state.elapsed_duration(since) or 0.0)
        return share >= patience.value
    return state.timestamp.get(patience.unit) - since.get(patience.unit) >= patience
