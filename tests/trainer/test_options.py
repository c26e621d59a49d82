"""Groups of options."""

from __future__ import annotations

import math

import pytest

from composer_dist.errors import ParallelismValueError
from composer_dist.trainer.step import GradientClipping


def test_a_number_is_a_norm() -> None:
    assert GradientClipping.of(1) == GradientClipping(norm=1)
    clipping = GradientClipping(value=0.5)
    assert GradientClipping.of(clipping) is clipping
    assert GradientClipping.of(None) is None
    GradientClipping(norm=1.0, norm_type=math.inf)


def test_what_clips_nothing_or_everything_is_refused() -> None:
    with pytest.raises(ParallelismValueError, match="needs a norm or a value"):
        GradientClipping()
    for name in ("norm", "value", "norm_type"):
        with pytest.raises(ParallelismValueError, match=f"{name} must be positive, not -1"):
            GradientClipping(**{"norm": 1.0, name: -1})
    with pytest.raises(ParallelismValueError, match="norm must be positive, not 0"):
        GradientClipping.of(0)
