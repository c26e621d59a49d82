"""The base of all loggers."""

from collections.abc import Mapping, Sequence
from typing import Any

from composer_dist.trainer.callbacks.base import Callback
from composer_dist.trainer.logger import Logger as Logger
from composer_dist.trainer.logger import Metrics, Row
from composer_dist.trainer.state import State


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
