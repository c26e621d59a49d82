"""Every event has its method, and they come in Composer's order."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from composer_dist.trainer import Callback, Event
from tests.kit.training import classifier, loader, quiet


class Recorder(Callback):
    """Writes events down."""

    def __init__(self) -> None:
        self.seen: list[Event] = []

    def run_event(self, event: Event, state: Any, logger: Any) -> None:
        self.seen.append(event)

    def taken(self) -> list[Event]:
        seen, self.seen = self.seen, []
        return seen


def test_the_callback_has_exactly_one_method_for_each_event() -> None:
    methods = [name for name, _ in inspect.getmembers(Callback, inspect.isfunction)]
    others = ["run_event", "close", "state_dict", "load_state_dict"]
    assert sorted(methods) == sorted([*(event.value for event in Event), *others])


@pytest.mark.promise(98)
def test_events_come_in_order() -> None:
    recorder = Recorder()
    trainer, _ = quiet(
        classifier(), callbacks=recorder, eval_dataloader=loader(4), device_train_microbatch_size=2
    )
    assert recorder.taken() == [Event.INIT]
    trainer.fit(duration="1ep", train_dataloader=loader(4))
    order = list(Event)
    microbatch = order[order.index(Event.BEFORE_FORWARD) : order.index(Event.AFTER_TRAIN_BATCH)]
    evaluation = order[order.index(Event.EVAL_BEFORE_ALL) : order.index(Event.PREDICT_START)]
    assert recorder.taken() == [
        Event.FIT_START,
        Event.EPOCH_START,
        Event.BEFORE_DATALOADER,
        Event.AFTER_DATALOADER,
        Event.BATCH_START,
        Event.BEFORE_TRAIN_BATCH,
        *microbatch,
        *microbatch,
        Event.AFTER_TRAIN_BATCH,
        Event.BATCH_END,
        Event.BATCH_CHECKPOINT,
        Event.BEFORE_DATALOADER,
        Event.EPOCH_END,
        *evaluation,
        Event.EPOCH_CHECKPOINT,
        Event.FIT_END,
    ]
    trainer.predict(loader(4))
    assert recorder.taken() == order[order.index(Event.PREDICT_START) :]


@pytest.mark.promise(98)
def test_the_whole_run_with_evaluations_and_microbatches_is_in_order() -> None:
    """Two epochs of two batches of two microbatches; an evaluation of two batches after each, none twice."""
    recorder = Recorder()
    trainer, _ = quiet(
        classifier(),
        callbacks=recorder,
        train_dataloader=loader(8),
        eval_dataloader=loader(8),
        eval_interval="1ba",
        device_train_microbatch_size=2,
        max_duration="2ep",
    )
    trainer.fit()
    microbatch = [
        "BEFORE_FORWARD",
        "AFTER_FORWARD",
        "BEFORE_LOSS",
        "AFTER_LOSS",
        "BEFORE_BACKWARD",
        "AFTER_BACKWARD",
    ]
    eval_batch = ["EVAL_BATCH_START", "EVAL_BEFORE_FORWARD", "EVAL_AFTER_FORWARD", "EVAL_BATCH_END"]
    evaluation = ["EVAL_BEFORE_ALL", "EVAL_START", *eval_batch * 2, "EVAL_END", "EVAL_AFTER_ALL"]
    batch = ["BEFORE_DATALOADER", "AFTER_DATALOADER", "BATCH_START", "BEFORE_TRAIN_BATCH", *microbatch * 2]
    batch += ["AFTER_TRAIN_BATCH", "BATCH_END", *evaluation, "BATCH_CHECKPOINT"]
    epoch = ["EPOCH_START", *batch * 2, "BEFORE_DATALOADER", "EPOCH_END", "EPOCH_CHECKPOINT"]
    assert [event.name for event in recorder.seen] == ["INIT", "FIT_START", *epoch * 2, "FIT_END"]
