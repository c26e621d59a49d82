"""Microbatches accumulate to the whole batch's gradients, by the collectives that were asked for."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from composer_dist._torch import fsdp_params
from composer_dist.distributed import accumulate, accumulated_bytes, parallelize_model
from composer_dist.errors import ParallelismValueError
from tests.kit.compare import close, grads
from tests.kit.grids import crossed
from tests.kit.measure import Collectives, by_messages
from tests.kit.meshes import MESHES, mine
from tests.kit.toy import built
from tests.kit.world import on_ranks

UNITS, PARTS = 3, 4


class Model(nn.Module):
    """Two blocks and a head: three units."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


UNIT_TYPES = (Model, nn.Sequential, nn.Linear)


def inputs() -> Tensor:
    return torch.randn(32, 6, generator=torch.Generator().manual_seed(3))


@pytest.mark.promise(99)
@crossed({"how": ["sharded", "unsharded"], "kind, ranks": [("fsdp2", 2), ("hsdp", 4), ("ddp", 2)]})
@on_ranks("ranks")
def test_microbatches_accumulate_to_the_batchs_gradients(kind: str, ranks: int, how: Any) -> None:
    single, model = built(Model), built(Model)
    single(inputs()).square().mean().backward()
    parallelize_model(model, MESHES[kind][1])
    with by_messages(), Collectives() as counted:
        for index, part in enumerate(mine(inputs()).chunk(PARTS)):
            with accumulate(model, index == PARTS - 1, how):
                (model(part).square().mean() / PARTS).backward()
    counts, held = counted.counts, accumulated_bytes(model, how)
    close(grads(model), grads(single), atol=1e-7)
    scatters = {"fsdp2": UNITS, "hsdp": UNITS, "ddp": 0}[kind] * (PARTS if how == "sharded" else 1)
    assert counts["_reduce_scatter_base_"] == scatters
    assert counts["allreduce_"] == {"fsdp2": 0, "hsdp": UNITS, "ddp": 1}[kind]
    whole = sum(p.nbytes for p in single.parameters())
    assert held == (whole if how == "unsharded" and kind != "ddp" else 0)


@pytest.mark.parametrize("policy", [(None, None), (torch.bfloat16, None), (torch.bfloat16, torch.float32)])
@on_ranks(2)
def test_whole_gradients_are_counted_in_the_dtype_that_torch_keeps_them_in(policy: Any) -> None:
    options, model = {"mp_policy": MixedPrecisionPolicy(*policy)}, built(Model)
    parallelize_model(model, {}, fsdp_wrap_policy=lambda m: options if isinstance(m, UNIT_TYPES) else False)
    with accumulate(model, False, "unsharded"):
        model(inputs()).sum().backward()
    params = [param for m in model.modules() if isinstance(m, FSDPModule) for param in fsdp_params(m)]
    kept = [p._unsharded_param.grad if (own := p.unsharded_accumulated_grad) is None else own for p in params]
    assert accumulated_bytes(model, "unsharded") == sum(gradient.nbytes for gradient in kept)


def test_another_word_is_refused() -> None:
    with pytest.raises(ParallelismValueError, match="one of 'sharded', 'unsharded', not 'never'"):
        accumulate(nn.Linear(1, 1), True, "never").__enter__()  # type: ignore[arg-type]
