"""The time that is left."""

from typing import Any

import pytest

from composer_dist.trainer import RuntimeEstimator
from tests.kit.training import At, Clock, fitted, loader, quiet

pytestmark = pytest.mark.promise(109)


def estimated(**options: Any) -> tuple[list[tuple[int, float]], RuntimeEstimator]:
    """A batch takes 2 seconds, the first one 50; an evaluation of one batch 5."""
    clock = Clock(now=100.0)

    def batch(state: Any) -> None:
        clock.now += 50 if state.timestamp.batch == 0 else 2

    def evaluation(state: Any) -> None:
        clock.now += 5

    work = At(batch_start=batch, eval_batch_start=evaluation)
    estimator = RuntimeEstimator(clock=clock)
    _, log = fitted(callbacks=[work, estimator], max_duration="8ba", **options)
    return [(at.batch, value) for at, value in log.data["time/remaining_estimate"]], estimator


def test_the_first_batch_does_not_count() -> None:
    found, _ = estimated()
    assert found == [(batch, pytest.approx(2.0 * (8 - batch))) for batch in range(3, 9)]


def test_evaluations_count_from_the_first_on() -> None:
    found, estimator = estimated(eval_dataloader=loader(4), eval_interval="4ba")
    before, after = found[:2], found[2:]
    assert before == [(3, pytest.approx(10)), (4, pytest.approx(8))]
    # One evaluation in half of the run: another one in the other half.
    expected = [2 * (8 - batch) + 5 * (8 - batch) / 4 for batch in (5, 6, 7, 8)]
    assert after == [(batch, pytest.approx(left)) for batch, left in zip(range(5, 9), expected, strict=True)]
    assert estimator.state_dict() == {"eval_seconds": 10.0, "last_eval": 1.0}
    later = RuntimeEstimator()
    later.load_state_dict(estimator.state_dict())
    assert later.state_dict() == estimator.state_dict()


def test_an_evaluation_outside_of_fit_is_no_part_of_it() -> None:
    estimator = RuntimeEstimator()
    quiet(callbacks=estimator)[0].eval(loader())
    assert estimator.state_dict()["eval_seconds"] == 0
