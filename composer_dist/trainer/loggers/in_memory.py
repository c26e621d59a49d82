"""A logger that keeps everything: for tests, notebooks and plots."""

from collections.abc import Mapping, Sequence
from typing import Any

from composer_dist.errors import ParallelismKeyError
from composer_dist.trainer.clock import Timestamp
from composer_dist.trainer.logger import Metrics, Row
from composer_dist.trainer.loggers.destination import LoggerDestination
from composer_dist.trainer.state import State


class InMemoryLogger(LoggerDestination):
    """Keeps every value with its time, on every rank."""

    def __init__(self) -> None:
        self._data: dict[str, list[tuple[Timestamp, float]]] = {}
        self._pending: list[tuple[Timestamp, Metrics]] = []
        self.tables: dict[str, list[tuple[Timestamp, list[dict[str, str | float]]]]] = {}
        """Time and rows of every table logged, by name."""
        self.hyperparameters: dict[str, Any] = {}

    @property
    def data(self) -> dict[str, list[tuple[Timestamp, float]]]:
        """Time and value of everything logged, by name; reading it waits for the device."""
        for time, metrics in self._pending:
            for name, value in metrics.items():
                self._data.setdefault(name, []).append((time, float(value)))
        self._pending.clear()
        return self._data

    def log_metrics(self, metrics: Metrics, state: State) -> None:
        self._pending.append((state.timestamp, dict(metrics)))

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        self.hyperparameters.update(hyperparameters)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Row], state: State) -> None:
        named = [dict(zip(columns, row, strict=True)) for row in rows]
        self.tables.setdefault(name, []).append((state.timestamp, named))

    def values(self, name: str) -> list[float]:
        """All values of one metric, oldest first.

        Raises:
            ParallelismKeyError: nothing of that name was logged.
        """
        data = self.data
        if name not in data:
            known = ", ".join(sorted(data)) or "none"
            raise ParallelismKeyError(f"{name!r} was never logged. Logged metrics: {known}.")
        return [value for _, value in data[name]]
