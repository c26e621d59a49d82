"""The training loop: epochs, batches, schedulers, and evaluation in between."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from composer_dist.distributed.training.gradients import Accumulate
from composer_dist.trainer.data.feed import Fed, Feed
from composer_dist.trainer.data.sampling import set_epoch
from composer_dist.trainer.evaluation import Evaluator, compute_metrics, fresh_metrics
from composer_dist.trainer.events import Event
from composer_dist.trainer.every import Every
from composer_dist.trainer.logger import Logger
from composer_dist.trainer.microbatch import Microbatches, MicrobatchSize
from composer_dist.trainer.schedulers import set_rates
from composer_dist.trainer.state import State
from composer_dist.trainer.step import GradientClipping, measure, train_batch


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """How to train; see the Trainer's arguments."""

    microbatch_size: MicrobatchSize
    clipping: GradientClipping | None
    accumulate: Accumulate
    schedule_batches: bool
    evaluators: Sequence[tuple[Evaluator, Every]]
    """What to evaluate on, and when, beside at the end."""
    replicas: int
    """Ranks with different data."""


class TrainingLoop:
    """Trains until the state's `max_duration`; a later `run` goes on in the middle of the epoch.

    Every decision is taken from what all ranks know alike, so that they take it together.

    Args:
        run_event: calls the callbacks.
        evaluate: evaluates what it is given.
    """

    def __init__(
        self,
        state: State,
        logger: Logger,
        options: LoopOptions,
        run_event: Callable[[Event], None],
        evaluate: Callable[[Sequence[Evaluator]], object],
    ) -> None:
        self._state = state
        self._logger = logger
        self._options = options
        self._run_event = run_event
        self._evaluate = evaluate
        self._microbatches = Microbatches(state, options.microbatch_size)
        self._feed: Feed | None = None
        self._place: Mapping[str, Any] | None = None
        """Where the next pass begins, if not at the start."""
        self._began = 0.0

    def restart_epoch(self) -> None:
        """Forgets the place in the dataloader, because it is another one now."""
        self._feed = self._place = None

    def place(self) -> dict[str, Any] | None:
        """The place in the training data, of all ranks; None at the start of an epoch. Every rank asks."""
        if self._feed is not None:
            return self._feed.place()
        return dict(self._place) if self._place else None

    def go_to(self, place: Mapping[str, Any] | None) -> None:
        """Has the next `run` begin where `place` told."""
        self._feed, self._place = None, place

    def generators(self) -> dict[str, Any]:
        """The host's generators at that place, if reading has moved them since; else {}."""
        return self._feed.generators() if self._feed else {}

    def run(self) -> None:
        """Trains, with the events from FIT_START to FIT_END."""
        state = self._state
        state.model.train()
        state.stop_requested = False
        state.fit_start = state.timestamp
        state.train_metrics = fresh_metrics(state.model.get_metrics(is_train=True), state.device)
        state.dataloader, state.dataloader_label = state.train_dataloader, "train"
        state.dataloader_len = state.train_length
        for _, interval in self._options.evaluators:
            interval.start(state)
        self._began = time.monotonic() - state.timestamp.seconds
        self._run_event(Event.FIT_START)
        state.throughput.start(state.timestamp)
        while not state.finished and self._epoch():
            pass
        self._evaluate_those([evaluator for evaluator, _ in self._options.evaluators])
        self._run_event(Event.FIT_END)
        state.dataloader, state.dataloader_label, state.dataloader_len = None, None, None

    def _epoch(self) -> bool:
        """Trains to the end of the epoch or of the fit; False if a rank wished to stop."""
        state = self._state
        if self._feed is None:
            self._feed = self._open_feed()
            if not state.timestamp.batch_in_epoch:  # else the epoch began in another process
                self._run_event(Event.EPOCH_START)
        feed = self._feed
        while not state.finished:
            self._run_event(Event.BEFORE_DATALOADER)
            fed = feed.next(state.stop_requested, state.take_alarm())
            if fed is None:
                break
            self._batch(fed, feed)
        # A fit may end on the last batch, before the feed has been asked for one more.
        if feed.ended or state.timestamp.batch_in_epoch == feed.length:
            self._end_epoch()
        return not feed.stopped

    def _open_feed(self) -> Feed:
        dataloader = self._state.train_dataloader
        assert dataloader is not None  # Trainer.fit has checked
        set_epoch(dataloader, self._state.timestamp.epoch)
        place, self._place = self._place, None
        return Feed(
            dataloader,
            "train",
            partial(measure, self._state),
            clock=lambda: time.monotonic() - self._began,
            replicas=self._options.replicas,
            place=place,
        )

    def _batch(self, fed: Fed, feed: Feed) -> None:
        state = self._state
        state.batch, state.alarmed = fed.batch, fed.alarmed
        state.dataloader_len = state.train_length = feed.length
        set_rates(state)
        self._run_event(Event.AFTER_DATALOADER)
        self._run_event(Event.BATCH_START)
        metrics: dict[str, float | Tensor] = {
            **train_batch(
                state,
                fed,
                self._run_event,
                self._microbatches,
                self._options.clipping,
                self._options.accumulate,
            )
        }
        if self._options.schedule_batches:
            self._step_schedulers()
        state.timestamp = state.timestamp.next_batch(
            samples=fed.samples, tokens=fed.tokens, seconds=fed.seconds
        )
        state.throughput.update(state.timestamp)
        metrics |= compute_metrics(state.train_metrics, "train")
        self._logger.log_metrics(metrics)
        self._run_event(Event.BATCH_END)
        self._evaluate_if_due()
        self._run_event(Event.BATCH_CHECKPOINT)

    def _end_epoch(self) -> None:
        self._feed = None
        self._state.timestamp = self._state.timestamp.next_epoch()
        if not self._options.schedule_batches:
            self._step_schedulers()
        self._run_event(Event.EPOCH_END)
        self._evaluate_if_due()
        self._run_event(Event.EPOCH_CHECKPOINT)

    def _step_schedulers(self) -> None:
        with warnings.catch_warnings():
            # A loss scaler may have left out the optimizers' first steps.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            for scheduler in self._state.schedulers:
                scheduler.step()

    def _evaluate_if_due(self) -> None:
        self._evaluate_those(
            [one for one, interval in self._options.evaluators if interval.passed(self._state)]
        )

    def _evaluate_those(self, evaluators: Sequence[Evaluator]) -> None:
        """Evaluates on those that have not been evaluated on since the last batch."""
        evaluated, now = self._state.evaluated, self._state.timestamp.batch
        due = [evaluator for evaluator in evaluators if evaluated.get(evaluator.label) != now]
        if due:
            evaluated |= {evaluator.label: now for evaluator in due}
            with self._state.throughput.pause():
                self._evaluate(due)
