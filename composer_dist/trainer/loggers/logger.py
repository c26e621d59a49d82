"""One call that reaches every destination."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from composer_dist.trainer.callbacks.base import Callback

if TYPE_CHECKING:
    from composer_dist.trainer.state import State

Metrics = Mapping[str, float | Tensor]
Row = Sequence[str | float]


class LoggerDestination(Callback):
    """A place that metrics go to. It is a callback too, so that it can open, flush and close.

    Values may be scalar tensors on the device: convert them only when you write, because that waits
    for the device.
    """

    def log_metrics(self, metrics: Metrics, state: State) -> None:
        """Takes values by name, of the time `state.timestamp`."""

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Takes what the run was started with."""

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Row], state: State) -> None:
        """Takes a table of texts and numbers, of the time `state.timestamp`."""


class Logger:
    """Hands everything to every destination, and keeps the last values in the state."""

    def __init__(self, state: State, destinations: Sequence[LoggerDestination] = ()) -> None:
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
