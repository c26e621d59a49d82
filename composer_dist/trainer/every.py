"""How often something happens."""

from __future__ import annotations

from composer_dist.errors import ParallelismValueError
from composer_dist.trainer.clock import Time, Timestamp
from composer_dist.trainer.state import State


class Every:
    """An interval that passes again and again, at its multiples since the start of the run.

    Args:
        name: what the user calls it, for the error.
        interval: such as "10ba", "1ep" or "30sec"; an integer means epochs.

    Raises:
        ParallelismValueError: the interval is not positive.
    """

    def __init__(self, name: str, interval: Time | str | int) -> None:
        self.interval = Time.of(interval)
        if self.interval.value <= 0:
            raise ParallelismValueError(f"{name} must be positive, not '{self.interval}'.")
        self._seen = 0

    def start(self, state: State) -> None:
        """What has passed until now, in this process or an earlier one, counts as seen."""
        self._seen = state.intervals(self.interval)

    def passed(self, state: State, at: Timestamp | None = None) -> bool:
        """Whether the interval has passed since the last time this was true."""
        count = state.intervals(self.interval, at)
        due = count > self._seen
        self._seen = max(count, self._seen)
        return due

    def passes_with_this_batch(self, state: State) -> bool:
        """`passed`, asked within a training batch, of the time when it will have ended."""
        return self.passed(state, state.timestamp.next_batch())
