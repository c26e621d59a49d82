"""A logger for MLflow."""

import os
import sys
import time as clock
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from composer_dist.errors import ParallelismRuntimeError, ParallelismValueError
from composer_dist.trainer.clock import Time, Timestamp
from composer_dist.trainer.logger import Row
from composer_dist.trainer.loggers.tensorboard import markdown
from composer_dist.trainer.loggers.writing import WritingLogger, require

_MOST_METRICS, _MOST_PARAMS, _LONGEST = 1000, 100, 6000
"""What an MLflow server takes at once, and the longest value of a parameter."""


@contextmanager
def _few_retries() -> Iterator[None]:
    """A server that does not answer is an error after seconds, unless the user has set how often to try."""
    name = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
    given = name in os.environ
    os.environ.setdefault(name, "2")  # 7 take minutes
    try:
        yield
    finally:
        if not given:
            del os.environ[name]


class MLflowLogger(WritingLogger):
    """Logs to a run of MLflow: metrics by batch, hyperparameters as parameters, tables as Markdown artifacts.

    A run that resumes from a checkpoint continues the same run there, which keeps the first value of each
    batch. Changed parameters become tags, because MLflow does not let them change.

    Args:
        experiment: the experiment's name; made if there is none.
        run_name: the run's; None lets MLflow choose.
        tracking_uri: such as "sqlite:///mlflow.db" or a server's address; None as MLflow's environment says.
        tags: of the run.
        interval: how often to write; see `WritingLogger`.

    Raises:
        ParallelismValueError: mlflow is not installed.
    """

    def __init__(
        self,
        experiment: str = "Default",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: Mapping[str, str] | None = None,
        interval: Time | str | int = "5sec",
    ) -> None:
        super().__init__(interval)
        require("mlflow", self)
        self._experiment, self._run_name, self._uri = experiment, run_name, tracking_uri
        self._tags = dict(tags or {})
        self._client: Any = None
        self._known: dict[str, int] | None = None
        """The last batch of each metric that the run already has; None where it is a new one."""

    def _open(self, start: Timestamp, id: str | None) -> str:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        self.failures = (OSError, MlflowException)
        try:
            self._client = MlflowClient(self._uri)
        except MlflowException as error:
            raise ParallelismValueError(f"MLflowLogger: tracking_uri={self._uri!r}: {error}") from error
        with _few_retries():
            if id is None:
                self._known = None
                run = self._client.create_run(self._experiment_id(), run_name=self._run_name, tags=self._tags)
            else:
                self._known = {}
                self._client.update_run(id, status="RUNNING")
                run = self._client.get_run(id)
        self._run_id = run_id = str(run.info.run_id)
        return run_id

    def _experiment_id(self) -> str:
        """The experiment's, which another process may be making at the same time."""
        for _ in range(2):
            found = self._client.get_experiment_by_name(self._experiment)
            if found is not None:
                return str(found.experiment_id)
            try:
                return str(self._client.create_experiment(self._experiment))
            except self.failures as error:
                failure = error
        raise ParallelismRuntimeError(f"MLflow could not create {self._experiment!r}: {failure}")

    def _write_metrics(self, entries: Sequence[tuple[Timestamp, Mapping[str, float]]]) -> None:
        from mlflow.entities import Metric

        now = int(clock.time() * 1000)
        metrics = [
            Metric(name, value, now, time.batch)
            for time, values in entries
            for name, value in values.items()
            if self._is_new(name, time.batch)
        ]
        for first in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[first : first + _MOST_METRICS])

    def _write_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        from mlflow.entities import Param, RunTag

        there = self._client.get_run(self._run_id).data.params
        given = {name: str(value)[:_LONGEST] for name, value in hyperparameters.items()}
        params = [Param(name, value) for name, value in given.items() if name not in there]
        changed = [RunTag(n, value) for n, value in given.items() if n in there and there[n] != value]
        for first in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._run_id, params=params[first : first + _MOST_PARAMS])
        if changed:
            self._client.log_batch(self._run_id, tags=changed)

    def _write_table(self, time: Timestamp, name: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
        self._client.log_text(self._run_id, markdown(columns, rows), f"{name}/batch-{time.batch}.md")

    def _shut(self) -> None:
        # Called while an error passes, if there is one.
        error = sys.exc_info()[1]
        ended = "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED"
        self._client.set_terminated(self._run_id, "FINISHED" if error is None else ended)

    def _is_new(self, name: str, batch: int) -> bool:
        """Whether the run has no value yet; one that repeats batches would add a second one."""
        if self._known is None:
            return True
        if name not in self._known:
            history = self._client.get_metric_history(self._run_id, name)
            self._known[name] = max((one.step for one in history), default=-1)
        return batch > self._known[name]


class MLFlowLogger(MLflowLogger):
    """`MLflowLogger` as Composer spells it, and with its arguments.

    Args:
        experiment_name: the experiment's name; made if there is none.
        run_name: the run's; None lets MLflow choose.
        tags: of the run.
        tracking_uri: such as "sqlite:///mlflow.db" or a server's address; None as MLflow's environment says.
        flush_interval: batches between writes.
    """

    def __init__(
        self,
        experiment_name: str = "Default",
        run_name: str | None = None,
        tags: Mapping[str, str] | None = None,
        tracking_uri: str | None = None,
        flush_interval: int = 10,
    ) -> None:
        super().__init__(experiment_name, run_name, tracking_uri, tags, interval=f"{flush_interval}ba")
