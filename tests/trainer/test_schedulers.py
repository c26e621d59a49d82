"""Learning rates by the clock, compared with Composer's formulas, in one fit and in several."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import DataLoader, IterableDataset

from composer_dist.errors import ParallelismValueError
from composer_dist.trainer import (
    ConstantWithWarmupScheduler,
    CosineAnnealingWithWarmupScheduler,
    LinearWithWarmupScheduler,
)
from composer_dist.trainer.schedulers import sorted_out
from tests.kit.training import classifier, fitted, loader, points, quiet, sgd

BATCHES = 9  # three epochs of three


class Stream(IterableDataset[Any]):
    """Six points; it does not tell how many."""

    def __iter__(self) -> Iterator[Any]:
        return iter(points(6))


def rates(schedulers: Any, fits: tuple[str | None, ...] = (None,), max_duration: str = "3ep") -> list[float]:
    options = {"optimizers": partial(sgd, lr=2.0), "schedulers": schedulers, "max_duration": max_duration}
    trainer, log = quiet(train_dataloader=loader(), step_schedulers_every_batch=True, **options)
    for duration in fits:
        trainer.fit(duration=duration)
    return log.values("lr-SGD/group0")


def cosine(batch: int, warmup: int, end: int, alpha_f: float) -> float:
    if batch < warmup:
        return batch / warmup
    share = min((batch - warmup) / (end - warmup), 1)
    return alpha_f + (1 - alpha_f) * 0.5 * (1 + math.cos(math.pi * share))


@pytest.mark.promise(98)
@pytest.mark.parametrize("t_warmup", ["3ba", "1ep", "12sp"])
def test_constant_with_warmup(t_warmup: str) -> None:
    expected = [0.0, 2 / 3, 4 / 3] + [2.0] * 6
    assert rates(ConstantWithWarmupScheduler(t_warmup)) == pytest.approx(expected)


@pytest.mark.promise(98)
@pytest.mark.parametrize(("t_warmup", "t_max"), [("2ba", "1dur"), ("2ba", "9ba"), ("2ba", "3ep")])
def test_cosine_and_linear_with_warmup(t_warmup: str, t_max: str) -> None:
    found = rates(CosineAnnealingWithWarmupScheduler(t_warmup, t_max, alpha_f=0.1))
    assert found == pytest.approx([2 * cosine(batch, 2, BATCHES, 0.1) for batch in range(BATCHES)])
    found = rates(LinearWithWarmupScheduler(t_warmup, t_max, alpha_f=0.5))
    after = [2 * (1 - 0.5 * (batch - 2) / 7) for batch in range(2, BATCHES)]
    assert found == pytest.approx([0.0, 1.0, *after])


@pytest.mark.promise(98)
def test_a_schedule_is_the_same_in_several_fits_as_in_one() -> None:
    schedule = CosineAnnealingWithWarmupScheduler("2ba")
    assert rates(schedule, ("2ba", "2ba", None)) == pytest.approx(rates(schedule))


@pytest.mark.promise(98)
def test_a_fit_beyond_max_duration_counts_to_its_own_end() -> None:
    found = rates(CosineAnnealingWithWarmupScheduler("0ba"), (None, "9ba"), "9ba")
    assert found[:BATCHES] == pytest.approx([2 * cosine(batch, 0, 9, 0) for batch in range(9)])
    assert found[BATCHES:] == pytest.approx([2 * cosine(batch, 0, 18, 0) for batch in range(9, 18)])


@pytest.mark.promise(98)
@pytest.mark.parametrize("max_duration", ["3ba", "1ep"])
def test_a_fit_that_crosses_max_duration_counts_to_its_own_end(max_duration: str) -> None:
    schedule = CosineAnnealingWithWarmupScheduler("0ba")
    whole = [2 * cosine(batch, 0, 9, 0) for batch in range(9)]
    assert rates(schedule, ("9ba",), max_duration) == pytest.approx(whole)
    assert rates(schedule, ("3ep",), max_duration) == pytest.approx(whole)
    before = [2 * cosine(batch, 0, 3, 0) for batch in range(2)]
    assert rates(schedule, ("2ba", "7ba"), max_duration) == pytest.approx(before + whole[2:])


@pytest.mark.promise(118)
@pytest.mark.parametrize("kind", [CosineAnnealingWithWarmupScheduler, LinearWithWarmupScheduler])
@pytest.mark.parametrize("warmup", ["3ba", "6ba", "4ep"])
def test_a_warm_up_longer_than_the_run_rises_and_warns(kind: Any, warmup: str) -> None:
    length = 12 if warmup == "4ep" else int(warmup[0])
    with pytest.warns(UserWarning, match=f"warms up for '{warmup}', but training ends at '3ba'"):
        found = rates(kind(warmup), max_duration="3ba")
    assert found == pytest.approx([2 * batch / length for batch in range(3)])


@pytest.mark.promise(118)
def test_a_warm_up_in_epochs_of_unknown_length_warns_that_the_first_does_not_train() -> None:
    def of_stream(max_duration: str, t_warmup: str) -> list[float]:
        schedule = LinearWithWarmupScheduler(t_warmup)
        options = {"optimizers": partial(sgd, lr=3.0), "schedulers": schedule, "max_duration": max_duration}
        return fitted(train_dataloader=DataLoader(Stream(), 3), **options)[1].values("lr-SGD/group0")

    with pytest.warns(UserWarning, match=r"'0.1dur', but the number of batches in an epoch is unknown"):
        assert of_stream("3ep", "0.1dur")[:2] == [0.0, 0.0]
    assert of_stream("4ba", "0.25dur") == pytest.approx([0.0, 3.0, 2.0, 1.0])


@pytest.mark.promise(118)
@pytest.mark.parametrize(
    "schedulers",
    [
        CosineAnnealingWithWarmupScheduler("0.1dur"),
        lambda optimizer: LambdaLR(optimizer, lambda step: 0.0),  # such as a warm-up that steps by epochs
    ],
)
def test_a_run_that_trains_nothing_warns(schedulers: Any) -> None:
    with pytest.warns(UserWarning, match="The learning rate was 0 in all 1 batches: nothing was trained"):
        assert rates(schedulers, max_duration="1ba") == [0.0]


def test_a_schedule_goes_with_torchs_schedulers_and_other_schedules() -> None:
    optimizer = sgd(classifier())
    with pytest.raises(ParallelismValueError, match="give all of its times"):
        rates(LinearWithWarmupScheduler("5sp", "3ep"))
    two = [ConstantWithWarmupScheduler("2ba"), ConstantWithWarmupScheduler("0ba", alpha=0.5)]
    assert rates(two)[:3] == [0.0, 0.5, 1.0]
    torchs, ours = sorted_out([StepLR(optimizer, 1), *two], [optimizer])
    assert (len(torchs), ours) == (1, two)


def test_times_that_cannot_make_a_schedule_are_refused() -> None:
    with pytest.raises(ParallelismValueError, match="t_max is '0ba', but it must be positive"):
        CosineAnnealingWithWarmupScheduler("1ba", "0ba")
    with pytest.raises(ParallelismValueError, match="'soon' is not a valid duration"):
        ConstantWithWarmupScheduler("soon")


@pytest.mark.parametrize("value", ["0.5", None, math.nan, -1.0])
def test_what_a_function_returns_must_be_a_factor(value: Any) -> None:
    def halved(state: Any) -> Any:
        return value

    with pytest.raises(ParallelismValueError, match=r"The schedule .*halved must return .* it returned"):
        rates([halved])
