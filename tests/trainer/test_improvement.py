"""Whether a metric has stopped improving."""

from typing import Any

import pytest

from composer_dist.trainer.clock import Timestamp
from composer_dist.trainer.improvement import Improvement, Mode, measured_on

NAN = float("nan")


@pytest.mark.parametrize(
    ("best", "mode", "min_delta", "better", "worse"),
    [
        (None, "min", 0.1, 2.0, NAN),
        (2.0, "min", 0.1, 1.0, 1.95),
        (1.0, "max", 0.0, 2.0, 1.0),
        (1.0, "max", 0.0, 2.0, NAN),
    ],
)
def test_what_is_better(best: Any, mode: Mode, min_delta: float, better: float, worse: float) -> None:
    now, judge = Timestamp(batch=3), Improvement(best=best, waited=1)
    assert not judge.add(worse, now, mode, min_delta)
    assert judge == Improvement(best=best, waited=2)
    assert judge.add(better, now, mode, min_delta)
    assert judge == Improvement.from_state_dict(judge.state_dict()) == Improvement(best=better, best_at=now)


@pytest.mark.parametrize(
    ("metric", "label"),
    [("loss/eval/total", "eval"), ("metrics/a/F1", "a"), ("loss/train/total", None), ("lr/x", None)],
)
def test_which_evaluation_gives_a_metric(metric: str, label: str | None) -> None:
    assert measured_on(metric) == label
