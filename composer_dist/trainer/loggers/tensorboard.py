"""A logger for TensorBoard."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from composer_dist.trainer.clock import Time, Timestamp
from composer_dist.trainer.logger import Row
from composer_dist.trainer.loggers.writing import WritingLogger, require


class TensorBoardLogger(WritingLogger):
    """Writes event files: metrics as scalars by batch, tables and hyperparameters as text.

    A run that resumes into the same directory continues there; what it repeats is hidden.

    Args:
        log_dir: the run's directory.
        interval: how often to write; see `WritingLogger`.

    Raises:
        ParallelismValueError: TensorBoard is not installed.
    """

    def __init__(self, log_dir: str | os.PathLike[str], interval: Time | str | int = "5sec") -> None:
        super().__init__(interval)
        require("tensorboard", self)
        self._directory = str(log_dir)
        self._writer: Any = None
        self._last = 0

    def _open(self, start: Timestamp, id: str | None) -> str:
        self._start(start)
        return self._directory

    def _start(self, now: Timestamp) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard then shows nothing that an earlier process has written for these batches.
        self._writer = SummaryWriter(self._directory, purge_step=now.batch + 1)
        self._last = now.batch

    def _rewind(self, now: Timestamp) -> None:
        if now.batch < self._last:
            self._writer.close()
            self._start(now)

    def _write_metrics(self, entries: Sequence[tuple[Timestamp, Mapping[str, float]]]) -> None:
        for time, values in entries:
            for name, value in values.items():
                self._writer.add_scalar(name, value, time.batch)
            self._last = time.batch
        self._writer.flush()

    def _write_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        rows = [(name, str(value)) for name, value in hyperparameters.items()]
        self._writer.add_text("hyperparameters", markdown(("name", "value"), rows), self._last)

    def _write_table(self, time: Timestamp, name: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
        self._writer.add_text(name, markdown(columns, rows), time.batch)

    def _shut(self) -> None:
        self._writer.close()


class TensorboardLogger(TensorBoardLogger):
    """`TensorBoardLogger` as Composer spells it, and with its arguments.

    Args:
        log_dir: where the files go.
        flush_interval: batches between writes.
    """

    def __init__(
        self, log_dir: str | os.PathLike[str] = "tensorboard_logs", flush_interval: int = 100
    ) -> None:
        super().__init__(log_dir, interval=f"{flush_interval}ba")


def markdown(columns: Sequence[str], rows: Sequence[Row]) -> str:
    """A table in Markdown; a cell's line breaks and bars are written so that it stays one."""
    cells = [[str(cell).replace("|", "\\|").replace("\n", "<br>") for cell in row] for row in rows]
    lines = [columns, ["---"] * len(columns), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
