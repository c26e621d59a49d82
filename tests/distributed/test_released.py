"""A model that is dropped is freed: no cycle holds it that Python cannot find."""

import gc
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composer_dist.config.mesh import MeshConfig
from composer_dist.config.rule import Rule
from composer_dist.config.tensor_parallel import TPConfig
from composer_dist.distributed import build_mesh, parallelize_model
from tests.kit.meshes import ddp
from tests.kit.world import on_ranks

TWO = MeshConfig(dp_shard=1, tp=2)
WAYS: dict[str, Any] = {
    "fsdp": {},
    "hsdp": {"mesh": MeshConfig(dp_replicate=2)},
    "whole parameters in fsdp": {"rules": [Rule("0", shard=False)]},
    "ddp": ddp(),
}


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_a_model_that_is_dropped_is_freed(way: str, hooked: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if hooked:
        for parameter in model[0].parameters():
            parameter.register_post_accumulate_grad_hook(lambda one: None)
    parallelize_model(model, WAYS[way], optimizer=optimizer)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    before, parameter = ref(model), model[0].weight
    del model, optimizer
    gc.collect()
    assert before() is None
    parameter.sum().backward()  # its hooks are harmless


@on_ranks(2)
def test_models_share_the_groups_of_one_mesh() -> None:
    def prepared() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        parallelize_model(model, {"mesh": MeshConfig(dp_replicate=2)})
        model(torch.ones(2, 4)).sum().backward()
        return model

    first = prepared()
    groups = dist.get_pg_count()
    second = prepared()
    assert dist.get_pg_count() == groups
    assert second[0].weight.device_mesh is first[0].weight.device_mesh


@pytest.mark.promise(104)
@pytest.mark.parametrize("own", [False, True])
@on_ranks(2)
def test_models_share_the_parts_of_one_mesh(own: bool) -> None:
    """Torch 2.13 compiles no second model whose part is equal to the first one's, but not the same."""
    mesh = build_mesh(TWO) if own else TWO
    models = [nn.Sequential(nn.Linear(4, 4)) for _ in range(2)]
    for model in models:
        parallelize_model(model, {"mesh": mesh, "tp": TPConfig(plan={"0": "colwise"})})
    first, second = (model[0].weight.device_mesh for model in models)
    assert (first is second, first.mesh_dim_names) == (True, ("tp",))
