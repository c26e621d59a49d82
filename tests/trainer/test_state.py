"""What a state knows of its duration."""

from typing import Any

import pytest
import torch

from composer_dist.trainer.clock import Time, Timestamp
from composer_dist.trainer.state import State
from tests.kit.training import classifier


def state(duration: str | None, **fields: int) -> State:
    return State(
        model=classifier(),
        device=torch.device("cpu"),
        max_duration=duration and Time.of(duration),  # type: ignore[arg-type]
        timestamp=Timestamp(**fields),
        train_length=10,
    )


@pytest.mark.parametrize(
    ("duration", "fields", "share"),
    [
        ("2ep", {"epoch": 1, "batch_in_epoch": 5}, 0.75),
        ("2ep", {"epoch": 2}, 1.0),
        ("20ba", {"batch": 5}, 0.25),
        ("20ba", {"batch": 19}, 0.95),
        ("20ba", {"batch": 20}, 1.0),
        ("1e3tok", {"token": 300}, 0.3),
        ("1m", {"seconds": 15}, 0.25),
        (None, {"batch": 5}, None),
    ],
)
def test_the_share_of_the_duration_that_has_passed(duration: Any, fields: Any, share: float | None) -> None:
    now = state(duration, **fields)
    assert now.elapsed_duration() == pytest.approx(share)
    assert now.finished is (share == 1.0)


def test_intervals_are_counted_in_their_own_unit() -> None:
    now = state("20ba", batch=6, epoch=2, token=99)
    counts = {"3ba": 2, "1ep": 2, "100tok": 0, "0.1dur": 3}
    assert {every: now.intervals(Time.of(every)) for every in counts} == counts
    assert now.intervals(Time.of("0.1dur"), Timestamp(batch=5)) == 2
