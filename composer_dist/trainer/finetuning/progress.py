"""How far a phase has come, and whether it is over: by time, or because a metric improves no more."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from composer_dist.distributed.ranks import process_group
from composer_dist.errors import ParallelismKeyError
from composer_dist.trainer.clock import Time, Timestamp, TimeUnit
from composer_dist.trainer.finetuning.schedule import NoImprovement
from composer_dist.trainer.state import State
from composer_dist.wording import near_miss


@dataclass
class Progress:
    """What is known of the present phase; all of it is needed to go on in another process."""

    start: Timestamp = field(default_factory=Timestamp)
    best: float | None = None
    """The best value of the metric, this rank's."""
    waited: int = 0
    """Measurements without improvement."""
    measured: int | None = None
    """The batch after which was last measured: the same weights are not measured twice."""
    exhausted: bool = False
    """Whether some rank has waited long enough."""
    diverged: bool = False
    """Whether it was said that ranks measure differently."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values by name."""
        return asdict(self)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        """The inverse of `state_dict`."""
        return cls(**{**state, "start": Timestamp.from_state_dict(state["start"])})

    def is_over(self, until: Time | str | NoImprovement | None, state: State) -> bool:
        """Whether the phase, which began at `start`, has come to its end."""
        if isinstance(until, NoImprovement):
            return self.exhausted or self.is_over(until.at_most, state)
        return until is not None and self._has_passed(Time.of(until), state)

    def measure(self, until: NoImprovement, state: State) -> bool:
        """Takes the metric's last value into account; a collective.

        Ranks judge by their own values, which should be equal; where they are not, one rank's judgment
        that the phase is over goes for all, with a warning, and one's improvement is everybody's.

        Returns:
            Whether it is the best one so far.

        Raises:
            ParallelismKeyError: on every rank, where a rank has no such metric.
        """
        self.measured = state.timestamp.batch
        value = state.metric_values.get(until.metric)
        better = value is not None and until.is_better(float(value), self.best)
        if better and value is not None:
            self.best = float(value)
        self.waited = 0 if better else self.waited + 1
        over = self.waited >= until.patience
        flags = [value is None, better, over, not over]
        missing, some_better, some_over, some_not = process_group.all_reduce([*map(float, flags)], "max")
        if missing:
            known = sorted(state.metric_values)
            raise ParallelismKeyError(
                f"A phase ends by {until.metric!r}, which is not logged.{near_miss(until.metric, known)} "
                f"There is: {', '.join(known)}."
            )
        self.exhausted = bool(some_over)
        if some_over and some_not and not self.diverged:
            self.diverged = True
            warnings.warn(
                f"Ranks have different values of {until.metric}: some would end the phase, some would not. "
                "All end it. Log a value that is the same on every rank, as torchmetrics' are.",
                UserWarning,
                stacklevel=3,
            )
        return bool(some_better)

    def _has_passed(self, time: Time, state: State) -> bool:
        if time.unit is TimeUnit.DURATION:
            now, then = state.elapsed_duration(), state.elapsed_duration(self.start)
            return now is not None and then is not None and now - then >= time.value - 1e-9
        return state.timestamp.get(time.unit) - self.start.get(time.unit) >= time
