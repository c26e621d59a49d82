"""Has a metric stopped improving? The one judge, for `EarlyStopping` and for phases of fine-tuning."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

from composer_dist.config.base import require
from composer_dist.errors import ParallelismKeyError
from composer_dist.trainer.clock import Time, Timestamp
from composer_dist.trainer.state import State
from composer_dist.wording import listed, near_miss

Mode = Literal["min", "max"]
"""Whether smaller or larger values are better."""


_SMALL_IS_GOOD = ("loss", "error", "perplexity")


def mode_of(metric: str, mode: Mode | None) -> Mode:
    """`mode`, or if it is None "min" for a loss, an error or a perplexity, "max" for any other metric."""
    require("mode", mode, ("min", "max", None))
    return mode or ("min" if any(word in metric.lower() for word in _SMALL_IS_GOOD) else "max")


@dataclass(kw_only=True)
class Improvement:
    """The best value of a metric so far, and how long ago it was."""

    best: float | None = None
    best_at: Timestamp = field(default_factory=Timestamp)
    waited: int = 0
    """Measurements since the best one."""

    def add(self, value: float, now: Timestamp, mode: Mode | None, min_delta: float = 0.0) -> bool:
        """Takes a measurement into account; whether it beats the best one by more than `min_delta`."""
        gain = math.inf
        if self.best is not None:
            gain = self.best - value if mode == "min" else value - self.best
        better = gain > min_delta and not math.isnan(value)
        if better:
            self.best, self.best_at, self.waited = value, now, 0
        else:
            self.waited += 1
        return better

    def has_stopped(self, patience: int | Time, state: State) -> bool:
        """Whether so many measurements, or so much time, have passed since the best one."""
        if isinstance(patience, int):
            return self.waited >= patience
        return state.has_passed(patience, self.best_at)

    def state_dict(self) -> dict[str, Any]:
        """Plain values by name."""
        return asdict(self)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        """The inverse of `state_dict`."""
        times = {
            key: Timestamp.from_state_dict(value)
            for key, value in state.items()
            if isinstance(value, Mapping)
        }
        return cls(**{**state, **times})


def measured_on(metric: str) -> str | None:
    """The label of the dataloader whose evaluation gives a metric; None for training's and other metrics."""
    kind, _, rest = metric.partition("/")
    label = rest.partition("/")[0]
    return label if kind in ("loss", "metrics") and label != "train" else None


def check_measured(who: str, metric: str, state: State) -> None:
    """Raises a NoMetricError for a metric of data on which the fit does not evaluate, but on other data."""
    label = measured_on(metric)
    if label is not None and state.eval_labels and label not in state.eval_labels:
        kind, _, rest = metric.partition(f"/{label}")
        known = [f"{kind}/{other}{rest}" for other in state.eval_labels]
        raise NoMetricError(
            f"{who}: there will be no metric {metric!r}, because the fit evaluates on "
            f"{listed(state.eval_labels)} only. Use {' or '.join(map(repr, known))}."
        )


class NoMetricError(ParallelismKeyError):
    """A metric that is waited for and that nothing logs."""


def no_such_metric(who: str, metric: str, state: State) -> NoMetricError:
    """The error for a metric that is not logged."""
    known = sorted(state.metric_values)
    return NoMetricError(
        f"{who}: there is no metric {metric!r}.{near_miss(metric, known)} "
        f"Logged metrics: {', '.join(known) or 'none'}."
    )
