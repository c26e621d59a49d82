"""Writes by masks and indices into sharded parameters and gradients."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from composer_dist.config.mesh import MeshConfig
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.distributed import parallelize_model
from tests.kit.compare import grads, weights
from tests.kit.world import on_ranks

pytestmark = pytest.mark.promise(104)


def _of_each(write: Callable[[Tensor, Tensor], object]) -> Callable[[nn.Module], None]:
    """Writes into every gradient; the mask is whole, and the same on every rank."""

    def write_into(model: nn.Module) -> None:
        for parameter in model.parameters():
            mask = torch.zeros(parameter.shape, dtype=torch.bool)
            mask.view(-1)[::2] = True
            write(parameter.grad, mask)

    return write_into


def _parameters(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data[parameter.data > 0] = 0


FIRST = torch.tensor([0])
WRITES: dict[str, Callable[[nn.Module], None]] = {
    "own mask": _of_each(lambda g, mask: g.__setitem__(g > 0, 0)),
    "mask": _of_each(lambda g, mask: g.__setitem__(mask, 0)),
    "rows": _of_each(lambda g, mask: g.__setitem__(torch.arange(len(g)) % 2 == 0, 7)),
    "values": _of_each(lambda g, mask: g.__setitem__(mask, torch.arange(float(mask.sum())))),
    "masked_fill_": _of_each(lambda g, mask: g.masked_fill_(mask, torch.nan)),
    "columns": _of_each(lambda g, mask: g.masked_fill_(torch.arange(g.shape[-1]) == 1, 7)),
    "indices": _of_each(lambda g, mask: g.__setitem__(FIRST, torch.nan)),
    "put_": _of_each(lambda g, mask: g.index_put_((FIRST,), torch.tensor(1.0), accumulate=True)),
    "index_copy_": _of_each(lambda g, mask: g.index_copy_(0, FIRST, torch.ones(1, *g.shape[1:]))),
    "index_add_": _of_each(lambda g, mask: g.index_add_(0, FIRST, torch.ones(1, *g.shape[1:]))),
    "tril_": _of_each(lambda g, mask: g.tril_() if g.ndim == 2 else None),
    "parameters": _parameters,
}


@pytest.mark.parametrize("replicas", [1, 2])
@on_ranks(4)
def test_writes_by_masks_and_indices_into_shards_are_those_into_whole_tensors(replicas: int) -> None:
    for name, write in WRITES.items():
        torch.manual_seed(0)
        alone = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        model = copy.deepcopy(alone)
        parallelize_model(model, ParallelismConfig(mesh=MeshConfig(dp_replicate=replicas, dp_shard=-1)))
        for one in (alone, model):
            one(torch.ones(2, 5)).square().sum().backward()
            write(one)
        for kind in (weights, grads):
            found, expected = kind(model), kind(alone)
            for key, value in expected.items():
                told = f"{name}, {key}: {{}}".format
                torch.testing.assert_close(found[key], value, equal_nan=True, msg=told)
