"""The base of loggers that write files or talk to a service.

Rank 0 writes. Values stay on the device until it is time to write and are then read together; what was logged
at one moment is one entry. Nothing is opened before the first run starts, because only then is it known
whether it resumes an earlier one.
"""

import importlib.util
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.errors import ParallelismValueError
from composer_dist.progress import Progress
from composer_dist.trainer.clock import Time, Timestamp
from composer_dist.trainer.events import Every
from composer_dist.trainer.logger import Logger, Metrics, Row
from composer_dist.trainer.loggers.destination import LoggerDestination
from composer_dist.trainer.state import State
from composer_dist.users_code import warn


class WritingLogger(LoggerDestination):
    """The base of loggers that write files or talk to a service; override the methods `_open` to `_shut`.

    A failure to open is an error on every rank. A later failure to write is a warning, once for several in a
    row, and the run continues.

    Args:
        interval: how often to write, besides after evaluations, before checkpoints and at the end. An
            integer means epochs.
    """

    failures: tuple[type[Exception], ...] = (OSError,)
    """What a write may raise without ending the run."""

    def __init__(self, interval: Time | str | int = "5sec") -> None:
        self._every = Every(f"{type(self).__name__}'s interval", interval)
        self._hyperparameters: dict[str, Any] = {}
        self._news: dict[str, Any] = {}
        """Hyperparameters not written yet."""
        self._metrics: list[tuple[Timestamp, dict[str, float | Tensor]]] = []
        self._tables: list[tuple[Timestamp, str, Sequence[str], Sequence[Row]]] = []
        self._is_open = self._writes = self._failing = False
        self._id: str | None = None
        """What a later process needs to continue the same output, equal on all ranks."""

    def log_metrics(self, metrics: Metrics, state: State) -> None:
        if state.rank:
            return
        if not self._metrics or self._metrics[-1][0] != state.timestamp:
            self._metrics.append((state.timestamp, {}))
        self._metrics[-1][1].update(metrics)

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        self._hyperparameters.update(hyperparameters)
        self._news.update(hyperparameters)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Row], state: State) -> None:
        if state.rank == 0:
            self._tables.append((state.timestamp, name, columns, rows))

    def fit_start(self, state: State, logger: Logger) -> None:
        """Opens, the first time; takes back what was written for a later time than now."""
        self._begin(state)
        self._every.start(state)
        if self._writes:
            self._attempt(lambda: self._rewind(state.timestamp))
        self._flush()

    def eval_start(self, state: State, logger: Logger) -> None:
        self._begin(state)
        self._flush()

    predict_start = eval_start

    def batch_end(self, state: State, logger: Logger) -> None:
        if self._every.passed(state):
            self._flush()

    def eval_after_all(self, state: State, logger: Logger) -> None:
        self._flush()

    fit_end = predict_end = eval_after_all

    def state_dict(self) -> dict[str, Any]:
        """Writes what there is, before the checkpoint is; returns what identifies the output."""
        self._flush()
        return {"id": self._id} if self._id else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._id = state["id"]

    def close(self, state: State, logger: Logger) -> None:
        """Writes what is left, also after an error or Ctrl-C; a later `fit` opens again."""
        try:
            self._flush()
        finally:
            opened, self._is_open, self._writes = self._writes, False, False
            if opened:
                self._attempt(self._shut)

    def _begin(self, state: State) -> None:
        """Opens on rank 0, in agreement with all ranks."""
        if self._is_open:
            return
        error: Exception | None = None
        step = f"opening {type(self).__name__}"
        if state.rank == 0:
            try:
                with Progress(shown=True).stage(step):  # a server may not answer for a while
                    self._id = self._open(state.timestamp, self._id)
            except Exception as caught:  # any error must be reported to the other ranks
                error = caught
        self._id = Agreement().reach(step, self._id, lambda found: found[0], error=error)
        self._is_open, self._writes = True, state.rank == 0

    def _flush(self) -> None:
        if not self._writes:
            return
        metrics, self._metrics = self._metrics, []
        tables, self._tables = self._tables, []
        news, self._news = self._news, {}
        entries = read(metrics)

        def write() -> None:
            if news:
                self._write_hyperparameters(news)
            if entries:
                self._write_metrics(entries)
            for time, name, columns, rows in tables:
                self._write_table(time, name, columns, rows)
            self._failing = False

        if news or entries or tables:
            self._attempt(write)

    def _attempt(self, write: Callable[[], None]) -> None:
        try:
            write()
        except self.failures as error:
            if not self._failing:
                why = f"{type(error).__name__}: {error}"
                warn(f"{type(self).__name__} could not write: {why}. Training continues without this record.")
            self._failing = True

    def _open(self, start: Timestamp, id: str | None) -> str | None:
        """Opens the output for a run that starts, or resumes, at `start`.

        Args:
            start: the present time.
            id: what `_open` returned in the process that this one resumes, if there was one.

        Returns:
            What a later process needs to continue this output.
        """
        raise NotImplementedError

    def _rewind(self, now: Timestamp) -> None:
        """Takes back what was written for a later time than `now`, if possible."""

    def _write_metrics(self, entries: Sequence[tuple[Timestamp, Mapping[str, float]]]) -> None:
        """Writes values by name, each moment's together, oldest first."""
        raise NotImplementedError

    def _write_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Writes what the run was started with."""
        raise NotImplementedError

    def _write_table(self, time: Timestamp, name: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
        """Writes a table."""
        raise NotImplementedError

    def _shut(self) -> None:
        """Ends the writing."""


def read(metrics: Sequence[tuple[Timestamp, Metrics]]) -> list[tuple[Timestamp, dict[str, float]]]:
    """The values as numbers; one wait for each device, not one for each value."""
    entries: list[tuple[Timestamp, dict[str, float]]] = []
    alike: defaultdict[tuple[torch.device, torch.dtype], list[tuple[dict[str, float], str, Tensor]]]
    alike = defaultdict(list)
    for time, values in metrics:
        numbers: dict[str, float] = {}
        entries.append((time, numbers))
        for name, value in values.items():
            numbers[name] = 0.0  # keeps the order
            if isinstance(value, Tensor):
                alike[value.device, value.dtype].append((numbers, name, value))
            else:
                numbers[name] = float(value)
    for each in alike.values():
        read_values = torch.stack([value.detach().reshape(()) for _, _, value in each]).tolist()
        for (numbers, name, _), number in zip(each, read_values, strict=True):
            numbers[name] = float(number)
    return entries


def require(package: str, logger: object) -> None:
    """Refuses a logger whose package is missing, and names the extra to install."""
    if importlib.util.find_spec(package) is None:
        name = type(logger).__name__
        raise ParallelismValueError(f"{name} needs {package}: pip install 'composer_dist[{package}]'.")
