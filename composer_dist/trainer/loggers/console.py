"""A logger that prints lines."""

from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from torch import Tensor

from composer_dist.progress import tell
from composer_dist.trainer.clock import Time
from composer_dist.trainer.events import Every
from composer_dist.trainer.logger import Logger, Metrics, Row
from composer_dist.trainer.loggers.destination import LoggerDestination
from composer_dist.trainer.state import State


class ConsoleLogger(LoggerDestination):
    """Prints the latest values every so often, on rank 0.

    Args:
        interval: time between two printouts, such as "10ba" or "1ep"; an integer means epochs. What an
            evaluation logs is printed at once.
        stream: where to print; standard error if None.
    """

    def __init__(self, interval: Time | str | int = "1ba", stream: TextIO | None = None) -> None:
        self._every = Every("ConsoleLogger's interval", interval)
        self._stream = stream
        self._pending: dict[str, Any] = {}

    def log_metrics(self, metrics: Metrics, state: State) -> None:
        self._pending.update(metrics)

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        self._pending.update(hyperparameters)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Row], state: State) -> None:
        if state.rank == 0:
            cells = (cell for row in rows for cell in zip(columns, row, strict=True))
            self._write(state, f" {name}", [f"{column}: {value}" for column, value in cells])

    def init(self, state: State, logger: Logger) -> None:
        self._print(state)

    def batch_end(self, state: State, logger: Logger) -> None:
        if self._every.passed(state):
            self._print(state)

    epoch_end = batch_end

    def eval_end(self, state: State, logger: Logger) -> None:
        self._print(state)

    def fit_end(self, state: State, logger: Logger) -> None:
        self._print(state)

    def _print(self, state: State) -> None:
        self._every.start(state)
        if state.rank == 0 and self._pending:
            width = max(map(len, self._pending))
            lines = [f"{name:<{width}}  {_spell(value)}" for name, value in self._pending.items()]
            self._write(state, "", lines)
        self._pending.clear()

    def _write(self, state: State, name: str, lines: Sequence[str]) -> None:
        at = state.timestamp
        epoch = max(1, at.epoch + (at.batch_in_epoch > 0))  # counted from 1, as the progress bar does
        head = f"[epoch {epoch}, batch {at.batch}]{name}"
        tell("\n  ".join([head, *lines]), self._stream)


def _spell(value: Any) -> str:
    return f"{float(value):.6g}" if isinstance(value, float | Tensor) else str(value)
