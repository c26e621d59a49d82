"""Ranks that share matrices are told if they do not do the same."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composer_dist import MeshConfig, ParallelismConfig, TPConfig
from composer_dist.distributed import parallelize_model, unparallelize_model
from composer_dist.distributed.prepared import record
from composer_dist.errors import ParallelismRuntimeError
from tests.kit.compare import fails_alike
from tests.kit.world import on_ranks

pytestmark = pytest.mark.promise(118)


def prepared() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plan = {"0": "colwise", "2": "rowwise"}
    config = ParallelismConfig(mesh=MeshConfig(tp=2), tp=TPConfig(plan=plan))
    parallelize_model(model, config, optimizer)
    return model, optimizer


@pytest.mark.parametrize(
    ("differs", "text"),
    [
        ("batch", "have different batches. Pass sampler_kwargs(mesh) to the sampler"),
        ("shape", "have different batches"),
        ("gradients", "have different modes of gradients. Run forward under torch.no_grad"),
        ("step", "have different numbers of optimizer steps. Call optimizer.step"),
    ],
)
@on_ranks(2)
def test_what_differs_is_named_on_every_rank(differs: str, text: str) -> None:
    model, optimizer = prepared()
    rank, x = dist.get_rank(), torch.ones(2, 4)
    model(x).sum().backward()
    if differs != "step" or rank == 0:
        optimizer.step()
    if differs == "batch":
        x = x + rank
    if differs == "shape":
        x = torch.ones(2 + rank, 4)
    with torch.set_grad_enabled(differs != "gradients" or rank == 0):
        fails_alike_in_forward(model, x, f"Ranks 0 and 1 share matrices (tensor parallelism) but {text}")


def fails_alike_in_forward(model: nn.Module, x: torch.Tensor, text: str) -> None:
    with fails_alike(ParallelismRuntimeError, text):
        model(x)


@on_ranks(2)
def test_the_check_is_rare_follows_copies_and_ends_with_the_preparation() -> None:
    model, optimizer = prepared()
    x, other = torch.ones(2, 4), torch.ones(2, 4) + dist.get_rank()
    twin: Any = copy.deepcopy(model)
    for each in (model, twin):
        for number in range(1, 8):
            each(other if number in (3, 5, 6, 7) else x)
        fails_alike_in_forward(each, other, "have different batches")
    assert pickle.dumps(next(iter(model._forward_pre_hooks.values())))
    unparallelize_model(model, optimizer)
    assert not model._forward_pre_hooks
    assert not record(model).ends
