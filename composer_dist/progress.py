"""The progress of a long step, shown by one rank: a bar on a terminal, or an occasional line in a log.

Nothing is shown, or imported for it, in the first two seconds. The bar is removed when the step ends, also by
an error or Ctrl-C.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TextIO

from composer_dist.ending import Ending

PATIENCE = 2.0
"""Seconds before a step is shown."""
INTERVAL = 10.0
"""Seconds between two lines in a log."""
_TICK = 0.25


def tell(text: str, stream: TextIO | None = None) -> None:
    """Print a line, by default on standard error; if its disk is full or fails, do without."""
    try:
        print(text, file=stream or sys.stderr, flush=True)
    except BrokenPipeError:  # nobody reads any more, as in `| head`
        raise
    except OSError:
        pass


@dataclass
class Stage:
    """One step: the bytes to move on this rank, and the bytes already moved."""

    label: str
    total: int = 0
    done: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def expect(self, nbytes: int) -> None:
        """Adds bytes to move."""
        with self._lock:
            self.total += nbytes

    def advance(self, nbytes: int) -> None:
        """Adds moved bytes; any thread may call it."""
        with self._lock:
            self.done += nbytes


class Progress:
    """Shows one stage at a time.

    Args:
        shown: whether this rank shows stages; other ranks only count.
        stream: where they are shown; None means standard error.
        clock: returns seconds.
    """

    def __init__(
        self, shown: bool, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._idle = shown
        self._stream = stream
        self._clock = clock

    @contextmanager
    def stage(self, label: str) -> Iterator[Stage]:
        """Shows a step while the body runs; inside another step, only the outer one is shown."""
        stage = Stage(label)
        if not self._idle:
            yield stage
            return
        self._idle, ended = False, Ending()
        display = Display(stage, self._stream or sys.stderr, self._clock)
        watcher = threading.Thread(
            target=_watch, args=(display, ended), daemon=True, name="composer_dist-progress"
        )
        watcher.start()
        try:
            yield stage
        finally:
            ended.set()
            watcher.join()
            display.close()
            self._idle = True


class Display:
    """One stage on a stream; `tick` updates it."""

    def __init__(self, stage: Stage, stream: TextIO, clock: Callable[[], float]) -> None:
        self._stage = stage
        self._stream = stream
        self._clock = clock
        self._began = clock()
        self._next = self._began + PATIENCE
        self._bar: Any = None

    def tick(self) -> None:
        """Shows the progress if it is time to."""
        now = self._clock()
        if now < self._next:
            return
        text = _describe(self._stage, now - self._began)
        if self._stream.isatty():
            self._draw(text)
        else:
            self._next = now + INTERVAL
            tell(f"{self._stage.label}: {text}", self._stream)

    def close(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.stop()

    def _draw(self, text: str) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns = TextColumn("{task.description}"), BarColumn(24), TextColumn("{task.fields[text]}")
            console = Console(file=self._stream)
            # Redirecting would send what is printed meanwhile to another stream.
            self._bar = Progress(
                *columns,
                console=console,
                transient=True,
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._bar.add_task(self._stage.label, text="")
            self._bar.start()
        total = self._stage.total or None
        done = min(self._stage.done, self._stage.total)
        self._bar.update(self._bar.task_ids[0], total=total, completed=done, text=text, refresh=True)


def _watch(display: Display, ended: Ending) -> None:
    while not ended.wait(_TICK):
        display.tick()


def _describe(stage: Stage, seconds: float) -> str:
    """Such as "1.0 GiB of 4.0 GiB (25%), 512.0 MiB/s"; the seconds while nothing is known to move."""
    from composer_dist.wording import human_bytes

    if not stage.total:
        return f"{seconds:.0f} s"
    done = min(stage.done, stage.total)
    rate = human_bytes(int(done / seconds)) if seconds else "0 B"
    return f"{human_bytes(done)} of {human_bytes(stage.total)} ({done / stage.total:.0%}), {rate}/s"
