"""After a backward that raised, training goes on as if it had not been."""

import copy

import pytest
import torch
from torch import nn

from composer_dist import FSDP2Config, MeshConfig, ParallelismConfig
from composer_dist.distributed import parallelize_model
from tests.kit.compare import close, grads
from tests.kit.grids import crossed
from tests.kit.meshes import mine
from tests.kit.training import recovers
from tests.kit.world import on_ranks

pytestmark = pytest.mark.promise(104)


WAYS = {
    "FSDP2": {},
    "FSDP2, gathered": {"fsdp2": FSDP2Config(reshard_after_forward=False)},
    "FSDP2, recomputed": {"activation_checkpointing": "composable"},
    "HSDP": {"mesh": MeshConfig(dp_replicate=2, dp_shard=1), "fsdp2": FSDP2Config()},
}


@recovers
@crossed({"error": [KeyboardInterrupt, torch.OutOfMemoryError], "way": WAYS})
@on_ranks(2)
def test_a_backward_that_raised_is_forgotten(way: str, error: type[BaseException]) -> None:
    blocks = [nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 2)]
    alone = nn.Sequential(*blocks)
    model = copy.deepcopy(alone)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallelize_model(model, ParallelismConfig(**WAYS[way]), optimizer)
    inputs = torch.randn(4, 4)

    def fail(*_: object) -> None:
        raise error("no memory")

    handle = model[1].register_full_backward_pre_hook(fail)
    for _ in range(2):
        with pytest.raises(error):
            model(mine(inputs)).square().mean().backward()
        optimizer.zero_grad()
    handle.remove()
    for _ in range(2):
        for one, values in ((model, mine(inputs)), (alone, inputs)):
            one(values).square().mean().backward()
    close(grads(model), grads(alone))
    optimizer.step()


@on_ranks(2)
def test_a_backward_that_raised_inside_of_another_leaves_that_one_alone() -> None:
    alone = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2))
    model = copy.deepcopy(alone)
    parallelize_model(model, FSDP2Config())

    def backward_inside(*_: object) -> None:
        with pytest.raises(RuntimeError, match="does not require grad"), torch.enable_grad():
            torch.ones(()).backward()

    inputs = torch.randn(4, 4)
    for one, values in ((model, mine(inputs)), (alone, inputs)):
        one[1].register_full_backward_hook(backward_inside)
        one(values).square().mean().backward()
    close(grads(model), grads(alone))
