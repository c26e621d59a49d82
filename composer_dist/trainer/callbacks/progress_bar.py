"""The progress of training on rank 0: place, loss, speed and time left.

A bar on a terminal; in a log file a line every few seconds, with the time of day.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection
from typing import TextIO

from composer_dist.progress import tell
from composer_dist.trainer.callbacks.base import Callback
from composer_dist.trainer.callbacks.lr_monitor import learning_rates
from composer_dist.trainer.clock import Timestamp, TimeUnit
from composer_dist.trainer.logger import Logger
from composer_dist.trainer.state import State

BAR_INTERVAL = 0.25
"""Seconds between two updates; each one reads the loss, which waits for the device."""


class ProgressBar(Callback):
    """Shows epoch and batch, loss, learning rate, samples or tokens per second, and the time left.

    Args:
        bar: a moving bar (True) or lines (False); None chooses what the stream can show.
        interval: seconds between two lines.
        stream: where to write; standard error if None.
        clock: gives the seconds.
    """

    def __init__(
        self,
        *,
        bar: bool | None = None,
        interval: float = 5.0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bar = bar
        self._lines_interval = interval
        self._stream = stream
        self._clock = clock
        self._display: _Lines | _Bar | None = None
        self._began: tuple[float, float] | None = None
        """The clock and the share of the run after the first batch, which takes longer than the others."""
        self._shown: float | None = None
        self._at = Timestamp()
        self._rates: Collection[float] = ()

    def fit_start(self, state: State, logger: Logger) -> None:
        self._began = self._shown = None
        self._at = state.timestamp
        self._open(state)

    def after_train_batch(self, state: State, logger: Logger) -> None:
        self._rates = learning_rates(state.optimizers).values()

    def batch_end(self, state: State, logger: Logger) -> None:
        self._at = state.timestamp
        if self._began is None:
            self._began = self._clock(), state.elapsed_duration(self._at) or 0.0
        if self._due():
            self._show_training(state, self._at)

    def fit_end(self, state: State, logger: Logger) -> None:
        self._show_training(state, state.timestamp)  # where epochs have no known length, this is one more
        self.close(state, logger)

    def eval_start(self, state: State, logger: Logger) -> None:
        self._open(state)

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        if self._display and self._due():
            done, total = state.eval_batch, state.dataloader_len
            share = done / total if total else None
            self._display.show(state.dataloader_label or "", share, f"batch {_of(done, total)}")

    def eval_end(self, state: State, logger: Logger) -> None:
        if not self._display:
            return
        label = state.dataloader_label or ""
        marks = (f"loss/{label}/", f"metrics/{label}/")
        parts = [
            f"{'loss' if name.startswith('loss') else name.rpartition('/')[2]} {float(value):.4f}"
            for name, value in state.metric_values.items()
            if name.startswith(marks)
        ]
        where = [f"after {_where(state, self._at)}"] if self._at.batch else []
        self._display.leave(label, "  ".join(where + parts))

    def eval_after_all(self, state: State, logger: Logger) -> None:
        if state.dataloader_label != "train":
            self.close(state, logger)

    predict_start = eval_start
    predict_batch_end = eval_batch_end

    def predict_end(self, state: State, logger: Logger) -> None:
        self.close(state, logger)

    def close(self, state: State, logger: Logger) -> None:
        if self._display:
            self._display.close()
        self._display = None

    def _open(self, state: State) -> None:
        if state.rank == 0 and self._display is None:
            stream = self._stream or sys.stderr
            bar = stream.isatty() if self._bar is None else self._bar
            self._display = _Bar(stream) if bar else _Lines(stream)

    def _due(self) -> bool:
        now = self._clock()
        interval = self._lines_interval if isinstance(self._display, _Lines) else BAR_INTERVAL
        if self._shown is not None and now - self._shown < interval:
            return False
        self._shown = now
        return True

    def _show_training(self, state: State, now: Timestamp) -> None:
        if not self._display:
            return
        share = state.elapsed_duration(now)
        parts = [_where(state, self._at)]
        if (loss := state.metric_values.get("loss/train/total")) is not None:
            parts.append(f"loss {float(loss):.4f}")
        if self._rates and isinstance(self._display, _Lines):  # a terminal may have 80 columns
            parts.append(f"lr {max(self._rates):.3g}")
        if speeds := state.throughput.rates():
            speed, what = (speeds.tokens, "tokens") if speeds.tokens else (speeds.samples, "samples")
            parts.append(f"{_short(speed)} {what}/s")
        if share and self._began is not None and share > self._began[1]:
            seconds = (self._clock() - self._began[0]) * max(1 - share, 0) / (share - self._began[1])
            parts.append(f"{_clock(seconds)} left")
        self._display.show("train", share, "  ".join(parts))


class _Lines:
    """One line per update of an activity, and one at its end."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show(self, label: str, share: float | None, text: str) -> None:
        percent = "" if share is None else f"{min(share, 1):.0%}"
        now = time.strftime("%H:%M:%S")
        tell(f"{now} {label:<5} {percent:>4}  {text}", self._stream)

    def leave(self, label: str, text: str) -> None:
        self.show(label, 1.0, text)

    def close(self) -> None:
        pass


class _Bar:
    """A bar for each activity, drawn in place by rich; a line at its end."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn
        from rich.table import Column

        self._progress = Progress(  # where a terminal is narrow, the end of the text is cut, and nothing else
            TextColumn(
                "{task.description:<5}",
                style="bold",
                markup=False,
                table_column=Column(no_wrap=True, min_width=5),
            ),
            BarColumn(bar_width=None),
            TaskProgressColumn(table_column=Column(no_wrap=True, min_width=4)),
            TextColumn("{task.fields[text]}", markup=False),
            console=Console(file=stream),
        )
        self._tasks: dict[str, TaskID] = {}
        self._progress.start()

    def show(self, label: str, share: float | None, text: str) -> None:
        if label not in self._tasks:
            self._tasks[label] = self._progress.add_task(label, total=None, text="")
        total, done = None if share is None else 1.0, min(share or 0, 1.0)
        self._progress.update(self._tasks[label], total=total, completed=done, text=text)

    def leave(self, label: str, text: str) -> None:
        if label in self._tasks:
            self._progress.remove_task(self._tasks.pop(label))
        from rich.text import Text

        self._progress.console.print(Text.assemble((f"{label:<5}", "bold"), f" {text}"))

    def close(self) -> None:
        self._progress.stop()


def _where(state: State, at: Timestamp) -> str:
    """The place in the run, in the unit of its duration."""
    until = state.max_duration
    if until is None:
        return f"epoch {at.epoch}  batch {at.batch}"
    length = state.train_length
    match until.unit:
        case TimeUnit.EPOCH:
            epoch = min(at.epoch + 1, int(until.value))
            return f"epoch {epoch}/{until.value}  batch {_of(at.batch_in_epoch, length)}"
        case TimeUnit.BATCH:
            return f"batch {at.batch}/{until.value}"
        case TimeUnit.SAMPLE | TimeUnit.TOKEN:
            done = _short(at.get(until.unit).value)
            words = {TimeUnit.SAMPLE: "samples", TimeUnit.TOKEN: "tokens"}
            return f"batch {at.batch}  {done}/{_short(until.value)} {words[until.unit]}"
    return f"batch {at.batch}  {_clock(at.seconds)}/{_clock(until.value)}"


def _of(done: int, total: int | None) -> str:
    return f"{done}/{total}" if total else str(done)


def _short(number: float) -> str:
    """Three figures and a suffix: 12345 is 12.3k."""
    for suffix in ("", "k", "M", "G"):
        if abs(number) < 999.5:
            return f"{number:.3g}{suffix}"
        number /= 1000
    return f"{number:.3g}T"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
