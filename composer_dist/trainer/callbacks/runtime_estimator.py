"""The time that is left."""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from composer_dist.trainer.callbacks.base import Callback
from composer_dist.trainer.logger import Logger
from composer_dist.trainer.state import State


class RuntimeEstimator(Callback):
    """Logs `time/remaining_estimate`: the seconds until the `fit` ends, evaluations included.

    It assumes the mean speed so far, without the first batches, which compile and allocate, and evaluations
    as frequent and as long as so far.

    Args:
        skip_batches: how many batches to skip first.
        clock: gives the seconds.
    """

    def __init__(self, skip_batches: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._skip = skip_batches
        self._clock = clock
        self._start: tuple[float, float] | None = None
        """Time and share where the measuring began."""
        self._skipped = 0
        self._paused = 0.0
        self._eval_began = 0.0
        self._eval_seconds = 0.0
        self._last_eval = 0.0
        """The share that had passed at the last evaluation."""

    def fit_start(self, state: State, logger: Logger) -> None:
        self._start, self._skipped, self._paused = None, 0, 0.0

    def batch_end(self, state: State, logger: Logger) -> None:
        share = state.elapsed_duration()
        if share is None:
            return
        if self._skipped < self._skip:
            self._skipped += 1
            return
        if self._start is None:
            self._start, self._paused = (self._clock(), share), 0.0
            return
        began, first = self._start
        if share > first:
            seconds_per_share = (self._clock() - began - self._paused) / (share - first)
            left = max(1.0 - share, 0.0)
            remaining = left * seconds_per_share + left * self._eval_seconds / (self._last_eval or math.inf)
            logger.log_metrics({"time/remaining_estimate": remaining})

    def eval_before_all(self, state: State, logger: Logger) -> None:
        self._eval_began = self._clock()

    def eval_after_all(self, state: State, logger: Logger) -> None:
        if state.dataloader_label != "train":
            return  # not part of a fit
        seconds = self._clock() - self._eval_began
        self._paused += seconds
        self._eval_seconds += seconds
        self._last_eval = state.elapsed_duration() or 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"eval_seconds": self._eval_seconds, "last_eval": self._last_eval}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._eval_seconds, self._last_eval = state["eval_seconds"], state["last_eval"]
