"""Every event has its method, and they come in Composer's order."""

import inspect
from typing import Any

import pytest

from composer_dist.trainer import Callback, Event
from tests.kit.training import fitted, loader


class Recorder(Callback):
    """Writes events down."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def run_event(self, event: Event, state: Any, logger: Any) -> None:
        self.seen.append(event.name)


def test_the_callback_has_exactly_one_method_for_each_event() -> None:
    methods = [name for name, _ in inspect.getmembers(Callback, inspect.isfunction)]
    others = ["run_event", "close", "state_dict", "state_to_fill", "load_state_dict"]
    assert sorted(methods) == sorted([*(event.value for event in Event), *others])


STEPS = "FORWARD", "LOSS", "BACKWARD"
MICROBATCH = [f"{when}_{step}" for step in STEPS for when in ("BEFORE", "AFTER")]
EVAL_BATCH = ["EVAL_BATCH_START", "EVAL_BEFORE_FORWARD", "EVAL_AFTER_FORWARD", "EVAL_BATCH_END"]
PREDICTION = ["PREDICT_START", *(name.replace("EVAL", "PREDICT") for name in EVAL_BATCH), "PREDICT_END"]


@pytest.mark.promise(98)
@pytest.mark.parametrize("interval", ["1ba", "1ep"])
def test_events_come_in_order(interval: str) -> None:
    """Two epochs of two batches of two microbatches; an evaluation of two batches after each, none twice."""
    recorder = Recorder()
    options = {"callbacks": recorder, "eval_interval": interval, "device_train_microbatch_size": 2}
    data = {"train_dataloader": loader(8), "eval_dataloader": loader(8)}
    trainer, _ = fitted(max_duration="2ep", **data, **options)
    evaluation = ["EVAL_BEFORE_ALL", "EVAL_START", *EVAL_BATCH * 2, "EVAL_END", "EVAL_AFTER_ALL"]
    after_batch, after_epoch = (evaluation, []) if interval == "1ba" else ([], evaluation)
    batch = ["BEFORE_DATALOADER", "AFTER_DATALOADER", "BATCH_START", "BEFORE_TRAIN_BATCH", *MICROBATCH * 2]
    batch += ["AFTER_TRAIN_BATCH", "BATCH_END", *after_batch, "BATCH_CHECKPOINT"]
    epoch = ["EPOCH_START", *batch * 2, "BEFORE_DATALOADER", "EPOCH_END", *after_epoch, "EPOCH_CHECKPOINT"]
    assert recorder.seen == ["INIT", "FIT_START", *epoch * 2, "FIT_END"]
    recorder.seen.clear()
    trainer.predict(loader(4))
    assert recorder.seen == PREDICTION


def test_events_are_listed_in_their_order() -> None:
    names = " ".join(event.name for event in Event)
    for part in (MICROBATCH, EVAL_BATCH, PREDICTION):
        assert " ".join(part) in names
