"""A logger that keeps everything: for tests, notebooks and plots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from composer_dist.errors import ParallelismKeyError
from composer_dist.trainer.loggers.logger import LoggerDestination, Metrics
from composer_dist.trainer.time import Timestamp

if TYPE_CHECKING:
    from composer_dist.trainer.state import State


class InMemoryLogger(LoggerDestination):
    """Keeps every value with its time, on every rank."""

    def __init__(self) -> None:
        self.data: dict[str, list[tuple[Timestamp, float]]] = {}
        """Time and value of everything logged, by name."""
        self.hyperparameters: dict[str, Any] = {}

    def log_metrics(self, metrics: Metrics, state: State) -> None:
        """Appends the values."""
        for name, value in metrics.items():
            self.data.setdefault(name, []).append((state.timestamp, float(value)))

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Keeps them in `hyperparameters`."""
        self.hyperparameters.update(hyperparameters)

    def values(self, name: str) -> list[float]:
        """All values of one metric, oldest first.

        Raises:
            ParallelismKeyError: nothing of that name was logged.
        """
        if name not in self.data:
            known = ", ".join(sorted(self.data)) or "nothing"
            raise ParallelismKeyError(f"{name!r} was never logged; there is: {known}.")
        return [value for _, value in self.data[name]]
