"""A logger for Weights & Biases."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from composer_dist.trainer.clock import Time, Timestamp
from composer_dist.trainer.logger import Row
from composer_dist.trainer.loggers.writing import WritingLogger, require


class WandBLogger(WritingLogger):
    """Logs to a run of Weights & Biases: metrics by batch, tables, hyperparameters as its config.

    A run that resumes from a checkpoint continues the same run there, which keeps the first value of each
    batch.

    Args:
        project: as for `wandb.init`, like the next two.
        name: the run's.
        mode: "online", "offline" or "disabled"; None as `WANDB_MODE` says.
        interval: how often to write; see `WritingLogger`.
        **options: of `wandb.init`, such as `entity`, `group`, `tags` or `dir`.

    Raises:
        ParallelismValueError: wandb is not installed.
    """

    def __init__(
        self,
        project: str | None = None,
        name: str | None = None,
        mode: Literal["online", "offline", "disabled"] | None = None,
        interval: Time | str | int = "5sec",
        **options: Any,
    ) -> None:
        super().__init__(interval)
        require("wandb", self)
        self._options = {"project": project, "name": name, "mode": mode} | options
        self._run: Any = None

    def _open(self, start: Timestamp, id: str | None) -> str:
        import wandb

        resumed = {"id": id, "resume": "allow"} if id else {}
        self._run = wandb.init(**(self._options | resumed))
        return str(self._run.id)

    def _write_metrics(self, entries: Sequence[tuple[Timestamp, Mapping[str, float]]]) -> None:
        for time, values in entries:
            self._run.log(dict(values), step=time.batch)

    def _write_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        self._run.config.update(dict(hyperparameters), allow_val_change=True)

    def _write_table(self, time: Timestamp, name: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
        import wandb

        table = wandb.Table(columns=list(columns), data=[list(row) for row in rows])
        self._run.log({name: table}, step=time.batch)

    def _shut(self) -> None:
        # Called while an error passes, if there is one: the run is then marked as crashed.
        self._run.finish(exit_code=int(sys.exc_info()[0] is not None))
