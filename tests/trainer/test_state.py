"""What a state knows of its duration."""

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
        ("1e3tok", {"token": 300}, 0.3),
        ("1m", {"seconds": 15}, 0.25),
        (None, {"batch": 5}, None),
    ],
)
def test_the_share_of_the_duration_that_has_passed(
    duration: str | None, fields: dict[str, int], share: float | None
) -> None:
    found = state(duration, **fields).elapsed_duration()
    assert found == (None if share is None else pytest.approx(share))


def test_a_run_is_finished_when_its_duration_is_reached() -> None:
    assert not state("20ba", batch=19).finished
    assert state("20ba", batch=20).finished
    assert not state(None, batch=20).finished


def test_intervals_are_counted_in_their_own_unit() -> None:
    now = state("20ba", batch=6, epoch=2, token=99)
    assert now.intervals(Time.of("3ba")) == 2
    assert now.intervals(Time.of("1ep")) == 2
    assert now.intervals(Time.of("100tok")) == 0
    assert now.intervals(Time.of("0.1dur")) == 3
    assert now.intervals(Time.of("0.1dur"), Timestamp(batch=5)) == 2
