"""Loss scaling: torch's GradScaler is the reference; an infinity on one rank counts on all."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler

from composer_dist.distributed import parallelize_model
from composer_dist.errors import ParallelismValueError
from composer_dist.trainer.scaling import LossScaler, LossScaling
from tests.kit.world import World

OPTIONS = LossScaling(init_scale=8.0, growth_interval=2)


def test_the_scale_moves_as_torchs_does() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    theirs = GradScaler("cpu", init_scale=8.0, growth_interval=2)
    ours = LossScaler(OPTIONS)
    for bad in (False, False, True, True, False, True, False, False, False, False):
        value = torch.inf if bad else 3.0
        parameter.grad = torch.full((3,), value) * theirs.scale(torch.ones(()))
        theirs.unscale_(optimizer)
        expected = parameter.grad.clone()
        theirs.step(optimizer)
        theirs.update()
        parameter.grad = torch.full((3,), value) * ours.scale
        finite = ours.unscale([parameter])
        ours.update(finite)
        assert finite is not bad
        torch.testing.assert_close(parameter.grad, expected, equal_nan=True)
        assert ours.scale == theirs.get_scale()
    other = LossScaler(OPTIONS)
    other.load_state_dict(ours.state_dict())
    assert other.state_dict() == ours.state_dict()


def shards() -> list[bool]:
    """Whether gradients are finite on all ranks, with an infinity in rank 1's shard alone, and without."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    parallelize_model(model, "fsdp")
    answers = []
    for value in (torch.inf, torch.nan, 1.0):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        if dist.get_rank() == 1:
            model.weight.grad.to_local().fill_(value)  # type: ignore[union-attr]
        answers.append(LossScaler(OPTIONS).unscale(model.parameters()))
    return answers


def test_an_infinity_in_one_shard_counts_on_all_ranks(world2: World) -> None:
    assert world2(shards) == [[False, False, True]] * 2


def test_factors_that_cannot_work_are_refused() -> None:
    with pytest.raises(ParallelismValueError, match="growth_factor > 1"):
        LossScaling(growth_factor=1.0)
    with pytest.raises(ParallelismValueError, match="growth_interval must be positive"):
        LossScaling(growth_interval=0)
