"""Composer's three ways to average gradients over microbatches, with its own example."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from composer_dist.distributed import parallelize_model
from composer_dist.distributed.replication.apply import DDPSyncStrategy, ddp_sync_context
from tests.kit.meshes import ddp
from tests.kit.world import on_ranks


class Choices(nn.Module):
    """Each input uses one of three weights."""

    def __init__(self) -> None:
        super().__init__()
        self.choices = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(3))
        for choice in self.choices:
            nn.init.zeros_(choice.weight)

    def forward(self, which: int) -> torch.Tensor:
        return self.choices[which](torch.ones(1))


def gradients(model: nn.Module) -> list[float | None]:
    """Each choice's gradient; untouched ones, None or zero, as None."""
    return [float(p.grad) if p.grad is not None and p.grad.any() else None for p in model.parameters()]


@pytest.mark.parametrize("prepare", [True, False])
@pytest.mark.parametrize(
    ("strategy", "first", "second"),
    [
        ("single_auto_sync", [-1, None, None], [-1.5, -1.5, None]),
        ("multi_auto_sync", [-1.5, None, None], [-1.5, -1.5, None]),
        ("forced_sync", [-1, None, None], [-1, -1, None]),
    ],
)
@on_ranks(2)
def test_composers_table_of_gradients(strategy: str, first: list[float], second: list[float], prepare: bool):
    rank, model = dist.get_rank(), Choices()
    if prepare:
        parallelize_model(model, ddp(find_unused_parameters=True))
    else:
        model = DistributedDataParallel(model, find_unused_parameters=True)
    seen = []
    for microbatch in range(2):
        with ddp_sync_context(model, microbatch == 1, DDPSyncStrategy(strategy) if prepare else strategy):
            (model(microbatch) - (rank + 1)).square().sum().div(2).backward()
            seen.append(gradients(model))
    assert rank > 0 or [*seen, gradients(model)] == [first, second, [-1.5, -1.5, None]]


@pytest.mark.promise(118)
@pytest.mark.parametrize("strategy", DDPSyncStrategy)
@pytest.mark.parametrize("prepare", [True, False])
@on_ranks(2)
def test_parameters_that_are_left_to_each_rank_are_not_averaged(strategy: str, prepare: bool):
    rank, model = dist.get_rank(), nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    if prepare:
        parallelize_model(model, ddp(ignored="1"))
    else:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["1.weight"])
        model = DistributedDataParallel(model)
    first, second = model.parameters()
    with torch.no_grad():
        first.fill_(1), second.fill_(1)
    with ddp_sync_context(model, True, strategy):
        model(torch.full((1, 1), rank + 1.0)).sum().backward()
    assert [float(first.grad), float(second.grad)] == [1.5, rank + 1]


def test_an_unknown_strategy_lists_those_there_are():
    assert len(DDPSyncStrategy) == 3
    with (
        pytest.raises(ValueError, match="'sometimes'.*single_auto_sync, multi_auto_sync, forced_sync"),
        ddp_sync_context(nn.Linear(1, 1), True, "sometimes"),
    ):
        pass
