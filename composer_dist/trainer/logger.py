"""One call that reaches every destination of metrics."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from composer_dist.trainer.state import State

Metrics = Mapping[str, float | Tensor]
Row = Sequence[str | float]


class Destination:
    """What a `Logger` writes to; `LoggerDestination` is this and a callback."""

    def log_metrics(self, metrics: Metrics, state: State) -> None:
        """Takes values by name, as of `state.timestamp`."""

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Takes what the run was started with."""

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Row], state: State) -> None:
        """Takes a table of texts and numbers, as of `state.timestamp`."""


class Logger:
    """Hands everything to every destination, and keeps the last values in the state."""

    def __init__(self, state: State, destinations: Iterable[Destination] = ()) -> None:
        self.destinations = tuple(destinations)
        self._state = state

    def log_metrics(self, metrics: Metrics) -> None:
        """Logs scalars by name, at the present time; they may be read later, so do not change them."""
        self._state.metric_values.update(metrics)
        for destination in self.destinations:
            destination.log_metrics(metrics, self._state)

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Logs what the run was started with."""
        for destination in self.destinations:
            destination.log_hyperparameters(hyperparameters)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
        """Logs a table of texts and numbers, at the present time."""
        for destination in self.destinations:
            destination.log_table(name, columns, rows, self._state)
