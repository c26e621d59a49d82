"""Writes by masks and indices into sharded parameters and gradients."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from composer_dist.config.mesh import MeshConfig
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.distributed import parallelize_model
from composer_dist.errors import ParallelismRuntimeError
from tests.kit.compare import grads, weights
from tests.kit.grids import slow
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


def _clipped(foreach: bool) -> Callable[[nn.Module], None]:
    """By the largest gradient, which a rank without rows has none of."""

    def clip(model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.01, torch.inf, foreach=foreach)

    return clip


def _rows(gradient: Tensor) -> Tensor:
    return torch.zeros(1, *gradient.shape[1:], dtype=torch.int64)


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
    "put_ adds": _of_each(lambda g, mask: g.put_(FIRST, torch.ones(1), accumulate=True)),
    "scatter_ multiplies": _of_each(lambda g, mask: g.scatter_(0, _rows(g), 3.0, reduce="multiply")),
    "scatter_reduce_": _of_each(lambda g, mask: g.scatter_reduce_(0, _rows(g), torch.ones(g.shape), "amax")),
    "fill_diagonal_": _of_each(lambda g, mask: g.fill_diagonal_(7) if g.ndim == 2 else None),
    "largest": _of_each(lambda g, mask: g.sub_(g.amax()).sub_(g.max(0)[0])),
    "norms": _of_each(lambda g, mask: g.sub_(g.norm(torch.inf)).add_(g.norm(-torch.inf, 0)).sub_(g.norm())),
    "clipped": _clipped(foreach=False),
    "clipped in one call": _clipped(foreach=True),
    "any": _of_each(lambda g, mask: g.mul_((g > 0).any().float()).mul_(1 + (g > 0).any(0).int())),
    "a column": _of_each(lambda g, mask: g.__setitem__((slice(None), 0), 7.0) if g.ndim == 2 else None),
    "tril_": _of_each(lambda g, mask: g.tril_() if g.ndim == 2 else None),
    "another layout": _of_each(lambda g, mask: g.copy_(g.softmax(0)).add_(g.flip(0), alpha=2)),
    "parameters": _parameters,
}


@pytest.mark.parametrize("replicas", [1, slow(2)])
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


@on_ranks(2)
def test_a_whole_tensor_written_into_a_shard_is_told_by_name() -> None:
    model = nn.Linear(4, 4)
    parallelize_model(model, ParallelismConfig())
    model(torch.ones(2, 4)).sum().backward()
    gradient = model.weight.grad
    assert isinstance(gradient, Tensor)
    for write in (gradient.mul_, gradient.copy_, gradient.__imul__):
        with pytest.raises(ParallelismRuntimeError, match="cannot use a whole tensor. Shard it too: distr"):
            write(torch.ones(4, 4))
