"""Which checkpoints are the best ones by a metric."""

import logging
from collections.abc import Collection
from dataclasses import dataclass, field

from composer_dist.trainer.improvement import Mode, measured_on, mode_of, no_such_metric
from composer_dist.trainer.state import State

_log = logging.getLogger("composer_dist")


@dataclass
class BestCheckpoints:
    """The values of a metric for checkpoints, by name.

    A metric of an evaluation counts for the checkpoint that is saved before the next batch.
    """

    monitor: str
    """The metric's name, such as "loss/eval/total"."""
    mode: Mode | None
    """Whether "min" or "max" is good; None: "min" for a loss, an error or a perplexity."""
    count: int
    """How many checkpoints stay."""
    values: dict[str, float] = field(default_factory=dict)
    _evaluated: int = -1
    """The batch after which `fit` last evaluated on the metric's data."""

    def __post_init__(self) -> None:
        self.mode, self._label = mode_of(self.monitor, self.mode), measured_on(self.monitor)

    def evaluated(self, state: State) -> None:
        """An evaluation has ended."""
        if state.dataloader_label == self._label:
            self._evaluated = state.timestamp.batch

    def measure(self, name: str, state: State) -> None:
        """Take the checkpoint `name`, which is saved now, into account, if its weights have been measured."""
        measured = self._label is None or self._evaluated == state.timestamp.batch
        value = float(state.metric_values[self.monitor]) if self.monitor in state.metric_values else None
        if measured and value is not None and value == value:  # not NaN
            self.values[name] = value

    def forget(self, name: str) -> None:
        """The checkpoint could not be saved."""
        self.values.pop(name, None)

    def among(self, names: Collection[str]) -> list[str]:
        """Those of the checkpoints `names` that stay, the best one first, of equal ones the earliest."""
        known = [name for name in self.values if name in names]
        ranked = sorted(known, key=self.values.__getitem__, reverse=self.mode == "max")
        return ranked[: self.count]

    def check(self, state: State) -> None:
        """At the end of a fit: raise if nothing logs the metric, warn if no checkpoint has a value of it."""
        if self.values:
            return
        if self.monitor not in state.metric_values:
            raise no_such_metric("CheckpointSaver", self.monitor, state)
        if state.rank == 0:
            _log.warning(
                "CheckpointSaver: no checkpoint was saved right after an evaluation, so none is the best by "
                "%s. Save as often as fit evaluates, or half as often.",
                self.monitor,
            )
