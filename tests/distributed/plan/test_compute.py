"""Estimates of computation, against torch's counter and by hand."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.config.replicate import DDPConfig
from composer_dist.config.rule import Rule
from composer_dist.distributed import plan_parallelism
from composer_dist.distributed.plan.topology import Algorithm, Topology
from composer_dist.distributed.plan.work import Device
from composer_dist.errors import ParallelismValueError
from tests.kit.compare import fails
from tests.kit.models import VOCABULARY, B

pytestmark = pytest.mark.promise(112)


@pytest.mark.parametrize("recomputed", [None, "composable"])
def test_flops_are_those_that_torch_counts(recomputed: str | None) -> None:
    model, tokens = B(), torch.ones(4, 16, dtype=torch.long)
    config = ParallelismConfig(fsdp2=FSDP2Config(), activation_checkpointing=recomputed)
    found = plan_parallelism(model, config, world_size=2).compute(tokens)
    with FlopCounterMode(display=False) as forward:
        loss = model(tokens).mean()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert found.forward == forward.get_total_flops()
    assert found.backward == backward.get_total_flops()
    blocks = sum(number for name, number in found.units.items() if name.startswith("layers"))
    head = 3 * 2 * 4 * 16 * 8 * VOCABULARY
    assert blocks + head == sum(found.units.values()) == found.forward + found.backward + found.recomputed
    # the last operator of a block is not needed again
    assert (found.recomputed > 0.8 * (found.forward - head / 3)) == bool(recomputed)


def test_attention_counts_too() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(x * self.scale, x, x, is_causal=True)

    plan = plan_parallelism(Attention(), ParallelismConfig(ddp=DDPConfig()), world_size=1)
    found = plan.compute(torch.ones(2, 3, 16, 8))
    products = 2 * 2 * 3 * 16 * 16 * 8
    assert (found.forward, found.backward) == (2 * products, 5 * products)


def test_a_step_is_its_operators_and_what_they_wait_for() -> None:
    """Two matrices of (4, 4) in units, on two ranks; every number is a power of ten or counted by hand."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    rules = [Rule(name, shard=True, reshard_after_forward=True) for name in ("0", "1")]
    plan = plan_parallelism(model, ParallelismConfig(rules=rules, check_order=False), world_size=2)
    device = Device(flops={torch.float32: 64.0}, bandwidth=1e30)
    links = Topology(within=32.0, between=1.0, algorithms=(Algorithm("ring", 0.0, 0.0, 0.0, 1.0),))
    found = plan.compute(torch.ones(2, 4), device=device, topology=links)
    # A product is 2 * 2 * 4 * 4 = 64 FLOPs, one second. The first layer's input needs no gradient.
    assert (found.forward, found.backward, found.recomputed) == (128, 192, 0)
    assert found.compute_seconds == pytest.approx(5)
    # A gathered matrix has 64 bytes, of which 32 come from the other rank: a second, as to reduce it.
    # gather 0 | 0, gather 1 | 1 | gather 1 | 1, gather 0 | reduce 1, 0 | reduce 0
    assert found.seconds == pytest.approx(1 + 1 + 1 + 1 + 2 + 1 + 1)
    assert found.exposed_seconds == pytest.approx(3)
    assert found.mfu == pytest.approx(320 / (8 * 64))
    assert "MFU" in str(found)
    with fails(ParallelismValueError, "no device 'h200'", "h100, a100"):
        plan.compute(torch.ones(2, 4), device="h200")
