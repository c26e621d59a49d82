"""The account of a preparation."""

import pytest
import torch

from composer_dist.distributed import parallelize_model
from composer_dist.distributed.account import Preparation, peak, reset_peak
from tests.kit.meshes import config
from tests.kit.toy import Toy, built

CPU = torch.device("cpu")


def test_a_preparation_says_what_was_done_and_prints() -> None:
    model = built()
    done = parallelize_model(model, config())
    assert done.model is model
    assert list(done.plain_parameters) == ["scale"]
    assert done.plain_parameters["scale"] is model.scale
    assert list(done.timings) == ["agree", "shard", "weights", "optimizer", "check"]
    assert done.seconds == pytest.approx(sum(done.timings.values()))
    assert done.bytes_moved == 0
    assert done.mesh.size() == 1
    text = str(done)
    assert "Preparation" in text
    assert "check" in text


def test_steps_add_up_and_count_when_they_fail() -> None:
    done = Preparation(Toy(), None, None)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(KeyError), done.step("a"):
            raise KeyError
    with done.step("b"):
        pass
    assert list(done.timings) == ["a", "b"]
    assert min(done.timings.values()) >= 0


def test_the_peak_is_measured_anew() -> None:
    reset_peak(CPU)
    low = peak(CPU)
    torch.ones(64 << 20, dtype=torch.uint8)
    high = peak(CPU)
    assert high >= low + (48 << 20)
    reset_peak(CPU)
    assert peak(CPU) < high
