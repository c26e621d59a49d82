"""Batches, samples and tokens per second over the last batches."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from composer_dist.trainer.clock import Timestamp


@dataclass(frozen=True)
class Rates:
    """Per second, over all ranks."""

    batches: float
    samples: float
    tokens: float


@dataclass
class Throughput:
    """The rates over a sliding window of batches; pauses do not count."""

    window: int = 20
    """Number of batches to average over."""
    clock: Callable[[], float] = time.perf_counter
    _paused: float = field(default=0.0, repr=False)
    _marks: deque[tuple[float, Timestamp]] = field(default_factory=deque, repr=False)

    def start(self, timestamp: Timestamp) -> None:
        """Starts measuring here, without what was before."""
        self._marks = deque([(self._now(), timestamp)], maxlen=self.window + 1)

    def update(self, timestamp: Timestamp) -> None:
        """Notes the end of a batch."""
        self._marks.append((self._now(), timestamp))

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leaves out the time that the body takes."""
        began = self.clock()
        try:
            yield
        finally:
            self._paused += self.clock() - began

    def rates(self) -> Rates | None:
        """The rates over the window; None before the first batch has ended."""
        if len(self._marks) < 2:
            return None
        (began, first), (ended, last) = self._marks[0], self._marks[-1]
        if ended <= began:
            return None
        seconds = ended - began
        return Rates(
            batches=(last.batch - first.batch) / seconds,
            samples=(last.sample - first.sample) / seconds,
            tokens=(last.token - first.token) / seconds,
        )

    def _now(self) -> float:
        return self.clock() - self._paused
