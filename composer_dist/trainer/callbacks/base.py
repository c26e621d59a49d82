"""The base of all callbacks: one method per event, each doing nothing."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from composer_dist.trainer.clock import Time
from composer_dist.trainer.events import Event, Every
from composer_dist.trainer.logger import Logger
from composer_dist.trainer.state import State


class Callback:
    """Code that runs at the Trainer's events, on every rank: override the methods you need.

    A method that communicates must do so on all ranks.

    `state_dict` returns what the callback needs to resume in a later process. A checkpoint saves it under the
    name of the callback's class and its number among callbacks of that class.
    """

    def state_dict(self) -> dict[str, Any]:
        """What a later process needs: plain values, tensors or DTensors; all ranks ask."""
        return {}

    def state_to_fill(self) -> dict[str, Any]:
        """What a checkpoint's state is read into: of a DTensor here, each rank reads only its own shard.

        Everything else is read in full. An empty mapping means what `state_dict` returns.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads what `state_dict` returned; called after INIT, before `fit`, on all ranks.

        The states of model, optimizers and schedulers are loaded afterwards: a callback that changes the
        optimizers' groups restores them here.
        """

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """Calls the method of `event`; override it to see all events in one place."""
        getattr(self, event.value)(state, logger)

    def init(self, state: State, logger: Logger) -> None:
        """The Trainer is set up: the model is prepared, nothing has run."""

    def fit_start(self, state: State, logger: Logger) -> None:
        """A `fit` begins."""

    def epoch_start(self, state: State, logger: Logger) -> None:
        """An epoch begins."""

    def before_dataloader(self, state: State, logger: Logger) -> None:
        """The next training batch is about to be fetched."""

    def after_dataloader(self, state: State, logger: Logger) -> None:
        """`state.batch` holds it."""

    def batch_start(self, state: State, logger: Logger) -> None:
        """A training batch begins."""

    def before_train_batch(self, state: State, logger: Logger) -> None:
        """The first microbatch is about to begin."""

    def before_forward(self, state: State, logger: Logger) -> None:
        """`state.batch` is the microbatch that the model gets next; its loss keeps its number of terms."""

    def after_forward(self, state: State, logger: Logger) -> None:
        """`state.outputs` is what the model returned."""

    def before_loss(self, state: State, logger: Logger) -> None:
        """The loss is about to be computed."""

    def after_loss(self, state: State, logger: Logger) -> None:
        """`state.loss` is the microbatch's loss."""

    def before_backward(self, state: State, logger: Logger) -> None:
        """The gradients are about to be computed."""

    def after_backward(self, state: State, logger: Logger) -> None:
        """The microbatch's gradients have been added."""

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """The batch's gradients are complete, not yet clipped; the optimizers step next."""

    def batch_end(self, state: State, logger: Logger) -> None:
        """The optimizers have stepped, and the timestamp has moved on."""

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """After `batch_end` and the evaluation that may follow it."""

    def epoch_end(self, state: State, logger: Logger) -> None:
        """An epoch has ended, and the timestamp has moved on."""

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        """After `epoch_end` and the evaluation that may follow it."""

    def fit_end(self, state: State, logger: Logger) -> None:
        """A `fit` has ended."""

    def eval_before_all(self, state: State, logger: Logger) -> None:
        """Evaluation begins."""

    def eval_start(self, state: State, logger: Logger) -> None:
        """A dataloader's evaluation begins."""

    def eval_batch_start(self, state: State, logger: Logger) -> None:
        """`state.batch` is the batch to evaluate."""

    def eval_before_forward(self, state: State, logger: Logger) -> None:
        """The model is about to get it."""

    def eval_after_forward(self, state: State, logger: Logger) -> None:
        """`state.outputs` is what the model returned."""

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        """The metrics have been updated."""

    def eval_end(self, state: State, logger: Logger) -> None:
        """A dataloader's metrics are computed and logged."""

    def eval_after_all(self, state: State, logger: Logger) -> None:
        """Evaluation has ended."""

    def predict_start(self, state: State, logger: Logger) -> None:
        """A prediction begins."""

    def predict_batch_start(self, state: State, logger: Logger) -> None:
        """`state.batch` is the batch to predict."""

    def predict_before_forward(self, state: State, logger: Logger) -> None:
        """The model is about to get it."""

    def predict_after_forward(self, state: State, logger: Logger) -> None:
        """`state.outputs` is what the model returned."""

    def predict_batch_end(self, state: State, logger: Logger) -> None:
        """The outputs have been kept."""

    def predict_end(self, state: State, logger: Logger) -> None:
        """A prediction has ended."""

    def close(self, state: State, logger: Logger) -> None:
        """The last call, also after an error or Ctrl-C: release resources."""


def may_change_batches(callback: Callback) -> bool:
    """Whether a callback that is not this library's is called between a batch is read and its forward."""
    events = Event.AFTER_DATALOADER, Event.BATCH_START, Event.BEFORE_TRAIN_BATCH, Event.BEFORE_FORWARD
    kind, names = type(callback), ("run_event", *(event.value for event in events))
    return not kind.__module__.startswith("composer_dist.") and any(
        name in vars(callback) or getattr(kind, name) is not getattr(Callback, name) for name in names
    )


def run_all(callbacks: Sequence[Callback], event: Event, state: State, logger: Logger) -> None:
    """Calls every callback; at the end of a fit also after an error of one, so that others save the run."""
    if event is Event.FIT_END:
        with ExitStack() as ending:
            for callback in reversed(callbacks):
                ending.callback(callback.run_event, event, state, logger)
        return
    for callback in callbacks:
        callback.run_event(event, state, logger)


class Periodic(Callback):
    """The base of callbacks that do something now and then.

    Args:
        interval: how often; an integer means epochs.
    """

    def __init__(self, interval: Time | str | int = "1ba") -> None:
        self._every = Every(f"{type(self).__name__}'s interval", interval)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Counts the interval from here."""
        self._every.start(state)
