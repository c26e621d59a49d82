"""Microbatches accumulate to the whole batch's gradients, by the collectives that were asked for."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.mesh import MeshConfig
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.config.replicate import DDPConfig
from composer_dist.distributed import accumulate, accumulated_bytes, parallelize_model
from composer_dist.distributed.moving.whole import gather
from composer_dist.errors import ParallelismValueError
from tests.kit.measure import Collectives
from tests.kit.toy import built
from tests.kit.world import run

UNITS, PARTS = 3, 4
CONFIGS = {
    "fsdp": ParallelismConfig(fsdp2=FSDP2Config()),
    "hsdp": ParallelismConfig(mesh=MeshConfig(dp_replicate=2)),
    "ddp": ParallelismConfig(ddp=DDPConfig()),
}


class Model(nn.Module):
    """Two blocks and a head: three units."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


def inputs() -> Tensor:
    return torch.randn(32, 6, generator=torch.Generator().manual_seed(3))


def accumulated(kind: str, how: str) -> tuple[dict[str, Tensor], Counter[str], int]:
    """Gradients of the batch, in parts; the reductions that backward made; bytes held."""
    model = built(Model)
    parallelize_model(model, CONFIGS[kind])
    mine = inputs().chunk(dist.get_world_size())[dist.get_rank()].chunk(PARTS)
    with Collectives() as counted:
        for index, part in enumerate(mine):
            with accumulate(model, index == PARTS - 1, how):  # type: ignore[arg-type]
                (model(part).square().mean() / PARTS).backward()
    counts = counted.counts
    found = {name: gather(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return found, counts, accumulated_bytes(model, how)  # type: ignore[arg-type]


@pytest.mark.promise(99)
@pytest.mark.parametrize("how", ["sharded", "unsharded"])
@pytest.mark.parametrize(("kind", "ranks"), [("fsdp", 2), ("hsdp", 4), ("ddp", 2)])
def test_microbatches_accumulate_to_the_batchs_gradients(kind: str, ranks: int, how: str) -> None:
    model = built(Model)
    model(inputs()).square().mean().backward()
    whole = sum(p.nbytes for p in model.parameters())
    for found, counts, held in run(accumulated, ranks, kind, how):
        assert found.keys() == dict(model.named_parameters()).keys()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-7)
        scatters = {"fsdp": UNITS, "hsdp": UNITS, "ddp": 0}[kind] * (PARTS if how == "sharded" else 1)
        assert counts["_reduce_scatter_base_"] == scatters
        assert counts["allreduce_"] == {"fsdp": 0, "hsdp": UNITS, "ddp": 1}[kind]
        assert held == (whole if how == "unsharded" and kind != "ddp" else 0)


def test_another_word_is_refused() -> None:
    with pytest.raises(ParallelismValueError, match="'sharded' or 'unsharded', not 'never'"):
        accumulate(nn.Linear(1, 1), True, "never").__enter__()  # type: ignore[arg-type]
