"""The training loop: epochs, batches, schedulers, and evaluation in between."""

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from composer_dist.distributed.prepared import named_parameters_canonical
from composer_dist.distributed.replication.replica import settle
from composer_dist.distributed.training.gradients import Accumulate, check_accumulate
from composer_dist.errors import ParallelismValueError
from composer_dist.trainer.arguments import check_microbatch_size
from composer_dist.trainer.clock import Time
from composer_dist.trainer.data.feed import Fed, Feed
from composer_dist.trainer.data.loader import length_of
from composer_dist.trainer.data.sampling import set_epoch
from composer_dist.trainer.evaluation import Evaluator, Timetable, compute_metrics, fresh_metrics
from composer_dist.trainer.events import Event
from composer_dist.trainer.logger import Logger
from composer_dist.trainer.microbatch import Microbatches, MicrobatchSize
from composer_dist.trainer.schedulers import Schedule, check_steps, set_rates
from composer_dist.trainer.state import State
from composer_dist.trainer.step import GradientClipping, measure, train_batch
from composer_dist.users_code import warn
from composer_dist.wording import listed


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """How to train; see the Trainer's arguments."""

    microbatch_size: MicrobatchSize
    clipping: GradientClipping | None
    accumulate: Accumulate
    schedules: Sequence[Schedule]
    schedule_batches: bool | None
    timetable: Timetable
    """When to evaluate, besides at the end."""
    subset: int | None = None
    """The most batches in an epoch."""

    def __post_init__(self) -> None:
        check_microbatch_size(self.microbatch_size)
        check_accumulate(self.accumulate)


@dataclass
class TrainingLoop:
    """Trains until the state's `max_duration`; a later `run` continues in the middle of the epoch.

    Every decision is based on what all ranks know, so that they all decide alike.
    """

    _state: State
    _logger: Logger
    _options: LoopOptions
    _replicas: int
    """The number of ranks with different data."""
    _run_event: Callable[[Event], None]
    """Calls the callbacks."""
    _evaluate: Callable[[Sequence[Evaluator]], object]
    """Evaluates on what it is given."""

    def __post_init__(self) -> None:
        self._microbatches = Microbatches(self._state, self._options.microbatch_size)
        self._feed: Feed | None = None
        self._place: Mapping[str, Any] | None = None
        """Where the next pass starts, if not at the beginning."""
        self._end: Mapping[str, Any] | None = None
        """The end of the last pass, if the next one depends on it."""
        self._began = 0.0
        self._moved = False
        """Whether a batch of this `run` had a learning rate other than 0."""
        self._may_change = False
        """Whether this rank's callbacks may change batches."""

    def plan(self, max_duration: Time | None, duration: Time | None) -> None:
        """Sets where the next `run` ends, and warns of options without effect."""
        state = self._state
        if state.train_dataloader is None:
            raise ParallelismValueError("Training needs a train_dataloader.")
        state.plan_fit(max_duration, duration)
        _check_trainable(state)
        length = length_of(state.train_dataloader, self._options.subset)
        check_steps(state, self._options.schedule_batches, length)

    def place(self) -> dict[str, Any] | None:
        """The position of all ranks in the training data; None if the epoch starts. A collective.

        A dataloader whose next order depends on its state has a position at the start of an epoch too.
        """
        if self._feed is not None:
            return self._feed.place()
        place = self._place or self._end
        return dict(place) if place else None

    def go_to(self, place: Mapping[str, Any] | None) -> None:
        """Makes the next `run` begin at a position that `place` returned; None: at the start of the epoch."""
        self._feed, self._place, self._end = None, place, None
        if place is None:
            start = {"batch_in_epoch": 0, "sample_in_epoch": 0, "token_in_epoch": 0}
            self._state.timestamp = replace(self._state.timestamp, **start)

    @property
    def evaluated(self) -> dict[str, int]:
        """By label, the batch after which `run` last evaluated."""
        return self._options.timetable.evaluated

    def generators(self) -> dict[str, Any]:
        """The states of the host's generators at that position, if they have changed since; else {}."""
        return self._feed.generators() if self._feed else {}

    def run(self, may_change_batches: bool = False) -> None:
        """Trains, with the events from FIT_START to FIT_END.

        Args:
            may_change_batches: whether this rank's callbacks may change the batches that are trained on.
        """
        state = self._state
        self._may_change = may_change_batches
        state.model.train()
        state.stop_requested = False
        state.fit_start = state.timestamp
        # With context parallelism each rank trains on its own part of the samples, and all of them count.
        state.train_metrics = fresh_metrics(state, state.model.get_metrics(is_train=True), ("tp",))
        state.dataloader, state.dataloader_label = state.train_dataloader, "train"
        state.dataloader_len = state.train_length
        self._options.timetable.start(state)
        self._moved = False
        self._began = time.monotonic() - state.timestamp.seconds
        self._run_event(Event.FIT_START)
        state.throughput.start(state.timestamp)
        while not state.finished and self._epoch():
            pass
        self._check_moved()
        settle(state.model)
        self._evaluate_on(self._options.timetable.last(state))
        self._run_event(Event.FIT_END)
        state.dataloader, state.dataloader_label, state.dataloader_len = None, None, None

    def _epoch(self) -> bool:
        """Trains to the end of the epoch or of the fit; returns False if a rank asked to stop."""
        state = self._state
        if self._feed is None:
            self._feed = self._open_feed()
            if not state.timestamp.batch_in_epoch:  # else the epoch began in another process
                self._run_event(Event.EPOCH_START)
        feed = self._feed
        while not state.finished:
            self._run_event(Event.BEFORE_DATALOADER)
            fed = feed.next(state.stop_requested, state.take_alarm(), self._may_change)
            if fed is None:
                if feed.ended and feed.alarmed:
                    state.raise_alarm()  # no batch is left to answer it; the next epoch's first one does
                break
            try:
                self._batch(fed, feed)
            except Exception:  # which the batch itself may have caused
                feed.hold(None)
                raise
        # A fit may end on the last batch, before the feed has been asked for one more.
        if feed.ended or state.timestamp.batch_in_epoch == feed.length:
            self._end_epoch(feed)
        return not feed.stopped

    def _open_feed(self) -> Feed:
        dataloader = self._state.train_dataloader
        assert dataloader is not None  # Trainer.fit has checked
        set_epoch(dataloader, self._state.timestamp.epoch)
        place, self._place, self._end = self._place, None, None
        return Feed(
            dataloader,
            "train",
            partial(measure, self._state),
            clock=lambda: time.monotonic() - self._began,
            replicas=self._replicas,
            place=place,
            most=self._options.subset,
        )

    def _batch(self, fed: Fed, feed: Feed) -> None:
        state = self._state
        feed.hold(fed)  # after Ctrl-C the next fit trains it
        state.batch, state.alarmed = fed.batch, fed.alarmed
        state.dataloader_len = state.train_length = feed.length
        size = {"samples": fed.samples, "tokens": fed.tokens}
        state.next_timestamp = state.timestamp.next_batch(**size, seconds=fed.seconds)
        if state.timestamp == state.fit_start:
            for schedule in self._options.schedules:
                schedule.check_warmup(state)
        set_rates(state, self._options.schedules)
        self._moved = self._moved or any(
            group["lr"] for optimizer in state.optimizers for group in optimizer.param_groups
        )
        self._run_event(Event.AFTER_DATALOADER)
        self._run_event(Event.BATCH_START)
        options = self._options

        def run_event(event: Event) -> None:
            self._run_event(event)
            if event is Event.AFTER_TRAIN_BATCH:  # the optimizers step next
                feed.hold(None)

        metrics = train_batch(state, fed, run_event, self._microbatches, options.clipping, options.accumulate)
        if options.schedule_batches:
            self._step_schedulers()
        state.timestamp = state.next_timestamp
        state.throughput.update(state.timestamp)
        metrics |= compute_metrics(state.train_metrics, "train")
        self._logger.log_metrics(metrics)
        self._run_event(Event.BATCH_END)
        self._evaluate_on(options.timetable.due(state))
        self._run_event(Event.BATCH_CHECKPOINT)

    def _end_epoch(self, feed: Feed) -> None:
        state, self._feed, self._end = self._state, None, feed.end()
        state.timestamp = state.timestamp.next_epoch()
        if not self._options.schedule_batches:
            self._step_schedulers()
        self._run_event(Event.EPOCH_END)
        self._evaluate_on(self._options.timetable.due(state))
        self._run_event(Event.EPOCH_CHECKPOINT)

    def _check_moved(self) -> None:
        """Warns if nothing was trained until the end of the training."""
        state = self._state
        batches = state.timestamp.batch - state.fit_start.batch
        if batches and not self._moved and state.finished and state.max_duration == state.schedule_end:
            warn(
                f"The learning rate was 0 in all {batches} batches: nothing was trained. Train for "
                "longer, or shorten the warm-up."
            )

    def _step_schedulers(self) -> None:
        with warnings.catch_warnings():
            # A loss scaler may have left out the optimizers' first steps.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            for scheduler in self._state.schedulers:
                scheduler.step()

    def _evaluate_on(self, evaluators: Sequence[Evaluator]) -> None:
        if evaluators:
            settle(self._state.model)  # metrics are those of a checkpoint that is saved next
            with self._state.throughput.pause():
                self._evaluate(evaluators)


def _check_trainable(state: State) -> None:
    """Refuses optimizers that would move nothing; warns of trainable parameters that none of them has."""
    if not state.optimizers:
        raise ParallelismValueError("Training needs optimizers; pass them to the Trainer.")
    held = {id(parameter) for parameter in state.optimized_parameters()}
    trainable = [one for one in named_parameters_canonical(state.model) if one[1].requires_grad]
    idle = [name for name, one in trainable if id(one) not in held]
    if idle and len(idle) == len(trainable):
        raise ParallelismValueError(
            f"The optimizers hold none of the model's trainable parameters ({listed(idle, 5)}), so training "
            "would change nothing. Build them from this model's parameters, after adapters are added."
        )
    if idle:
        warn(
            f"{listed(idle, 5)}: trainable but in no optimizer, so gradients are computed for nothing. Give "
            "them to an optimizer (built after adapters are added), or freeze them."
        )
