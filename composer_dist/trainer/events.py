"""The events at which callbacks are called, and repeating intervals."""

from enum import StrEnum
from functools import cached_property

from composer_dist.trainer.clock import Time, Timestamp
from composer_dist.trainer.state import State


class Event(StrEnum):
    """The events of a run, in order; names and order are Composer's.

    An event's value is the name of the `Callback` method. What happens between the events:

    ```
    INIT                                        the Trainer is set up
    FIT_START
    EPOCH_START
        BEFORE_DATALOADER, AFTER_DATALOADER     state.batch is set; its size is counted
        BATCH_START, BEFORE_TRAIN_BATCH
            BEFORE_FORWARD, AFTER_FORWARD       once per microbatch, as the next four
            BEFORE_LOSS, AFTER_LOSS
            BEFORE_BACKWARD, AFTER_BACKWARD
        AFTER_TRAIN_BATCH                       the gradients are complete; clipping and the step follow
        BATCH_END, (evaluation,) BATCH_CHECKPOINT       the timestamp has advanced
    EPOCH_END, (evaluation,) EPOCH_CHECKPOINT
    FIT_END
    ```
    """

    INIT = "init"
    FIT_START = "fit_start"
    EPOCH_START = "epoch_start"
    BEFORE_DATALOADER = "before_dataloader"
    AFTER_DATALOADER = "after_dataloader"
    BATCH_START = "batch_start"
    BEFORE_TRAIN_BATCH = "before_train_batch"
    BEFORE_FORWARD = "before_forward"
    AFTER_FORWARD = "after_forward"
    BEFORE_LOSS = "before_loss"
    AFTER_LOSS = "after_loss"
    BEFORE_BACKWARD = "before_backward"
    AFTER_BACKWARD = "after_backward"
    AFTER_TRAIN_BATCH = "after_train_batch"
    BATCH_END = "batch_end"
    BATCH_CHECKPOINT = "batch_checkpoint"
    EPOCH_END = "epoch_end"
    EPOCH_CHECKPOINT = "epoch_checkpoint"
    FIT_END = "fit_end"

    EVAL_BEFORE_ALL = "eval_before_all"
    EVAL_START = "eval_start"
    EVAL_BATCH_START = "eval_batch_start"
    EVAL_BEFORE_FORWARD = "eval_before_forward"
    EVAL_AFTER_FORWARD = "eval_after_forward"
    EVAL_BATCH_END = "eval_batch_end"
    EVAL_END = "eval_end"
    EVAL_AFTER_ALL = "eval_after_all"

    PREDICT_START = "predict_start"
    PREDICT_BATCH_START = "predict_batch_start"
    PREDICT_BEFORE_FORWARD = "predict_before_forward"
    PREDICT_AFTER_FORWARD = "predict_after_forward"
    PREDICT_BATCH_END = "predict_batch_end"
    PREDICT_END = "predict_end"

    @cached_property
    def section(self) -> str:
        """What a rank does after this event, for a `HangGuard`."""
        if self in (Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT):
            return "save"
        if self.value.startswith(("eval_", "predict_")):
            return "evaluation"
        return "setup" if self is Event.INIT else "step"

    def doing(self, batch: int) -> str:
        """What a rank does after this event, for error messages, which count batches from 1, as the bar does.

        Args:
            batch: how many batches are complete.
        """
        if self is Event.INIT:
            return "the set-up"
        if self.value in _DOING:
            is_complete = self in (Event.BATCH_END, Event.BATCH_CHECKPOINT)
            return f"{_DOING[self.value]} of batch {batch if is_complete else batch + 1}"
        for kind, words in (("eval_", "evaluation"), ("predict_", "prediction")):
            if self.value.startswith(kind):
                return f"{words} after batch {batch}"
        return f"{self.value} after batch {batch}"


_DOING = {
    "before_dataloader": "the data",
    "after_dataloader": "the start",
    "batch_start": "the start",
    "before_train_batch": "the start",
    "before_forward": "the forward",
    "after_forward": "the forward",
    "before_loss": "the loss",
    "after_loss": "the loss",
    "before_backward": "the backward",
    "after_backward": "the backward",
    "after_train_batch": "clipping and the optimizer step",
    "batch_end": "the end",
    "batch_checkpoint": "the checkpoint",
}


class Every:
    """A repeating interval; it passes at each of its multiples since the start of the run.

    Args:
        name: the option's name, for the error.
        interval: such as "10ba", "1ep" or "30sec"; an integer means epochs.

    Raises:
        ParallelismValueError: the interval is not positive.
    """

    def __init__(self, name: str, interval: Time | str | int) -> None:
        self.interval = Time.positive(name, interval)
        self._seen = 0

    def start(self, state: State) -> None:
        """Starts counting now; intervals that have already passed do not count."""
        self._seen = state.intervals(self.interval)

    def passed(self, state: State, at: Timestamp | None = None) -> bool:
        """Whether the interval has passed since this last returned True."""
        count = state.intervals(self.interval, at)
        due = count > self._seen
        self._seen = max(count, self._seen)
        return due

    def passes_with_this_batch(self, state: State) -> bool:
        """Like `passed`, for the end of the current training batch, and of the epoch if that ends with it.

        An epoch of unknown length ends when the next batch is fetched, so it counts with the batch after it.
        """
        end = state.next_timestamp
        if end.batch_in_epoch == state.train_length:
            end = end.next_epoch()
        return self.passed(state, end)
