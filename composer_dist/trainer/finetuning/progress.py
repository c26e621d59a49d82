"""How far a phase has come, and whether it is over: by time, or because a metric has stopped improving."""

from dataclasses import dataclass, field

from composer_dist.distributed.ranks import process_group
from composer_dist.trainer.clock import Time, Timestamp
from composer_dist.trainer.finetuning.schedule import NoImprovement
from composer_dist.trainer.improvement import Improvement, no_such_metric
from composer_dist.trainer.state import State
from composer_dist.users_code import warn


@dataclass(kw_only=True)
class PhaseProgress(Improvement):
    """What is known of the present phase; another process needs all of it to resume.

    `best` is this rank's best value.
    """

    start: Timestamp = field(default_factory=Timestamp)
    measured: int | None = None
    """The batch after which the metric was last measured: the same weights are not measured twice."""
    exhausted: bool = False
    """Whether some rank has waited long enough."""
    diverged: bool = False
    """Whether the warning that ranks measure differently was given."""

    def is_over(self, until: Time | str | NoImprovement | None, state: State) -> bool:
        """Whether the phase, which began at `start`, has come to its end."""
        if isinstance(until, NoImprovement):
            return self.exhausted or self.is_over(until.at_most, state)
        return until is not None and state.has_passed(Time.of(until), self.start)

    def measure(self, until: NoImprovement, state: State) -> bool:
        """Takes the metric's last value into account; returns whether it is the best one. A collective.

        Ranks judge by their own values, which should be equal. If they are not, one rank's judgment that the
        phase is over counts for all, with a warning, and so does one rank's improvement.
        """
        self.measured = state.timestamp.batch
        value = state.metric_values.get(until.metric, float("nan"))
        better = self.add(float(value), state.timestamp, until.mode, until.min_delta)
        over = self.has_stopped(until.patience, state)
        flags = [until.metric not in state.metric_values, better, over, not over]
        missing, some_better, some_over, some_not = process_group.all_reduce([*map(float, flags)], "max")
        if missing:
            raise no_such_metric("NoImprovement", until.metric, state)
        self.exhausted = bool(some_over)
        if some_over and some_not and not self.diverged:
            self.diverged = True
            warn(
                f"Ranks have different values of {until.metric}: some would end the phase, some would not. "
                "All end it. Log a value that is the same on every rank, as torchmetrics' are."
            )
        return bool(some_better)
