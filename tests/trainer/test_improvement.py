"""Whether a metric has stopped improving."""

import pytest

from composer_dist.trainer.clock import Timestamp
from composer_dist.trainer.improvement import Improvement, Mode, measured_on

NAN = float("nan")


@pytest.mark.parametrize(
    ("best", "value", "mode", "min_delta", "better"),
    [
        (None, 2.0, "min", 0.1, True),
        (2.0, 1.0, "min", 0.1, True),
        (2.0, 1.95, "min", 0.1, False),
        (None, NAN, "min", 0.1, False),
        (1.0, 2.0, "max", 0.0, True),
        (1.0, 1.0, "max", 0.0, False),
        (1.0, NAN, "max", 0.0, False),
    ],
)
def test_what_is_better(best: float | None, value: float, mode: Mode, min_delta: float, better: bool) -> None:
    now = Timestamp(batch=3)
    judge = Improvement(best=best, waited=1)
    assert judge.add(value, now, mode, min_delta) is better
    assert judge == (Improvement(best=value, best_at=now) if better else Improvement(best=best, waited=2))
    assert Improvement.from_state_dict(judge.state_dict()) == judge


@pytest.mark.parametrize(
    ("metric", "label"),
    [("loss/eval/total", "eval"), ("metrics/a/F1", "a"), ("loss/train/total", None), ("lr/x", None)],
)
def test_which_evaluation_gives_a_metric(metric: str, label: str | None) -> None:
    assert measured_on(metric) == label
