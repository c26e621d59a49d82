"""What a rank holds of quantized optimizer state, and for parameters without gradients."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.config.rule import Rule
from composer_dist.distributed import parallelize_model, plan_parallelism
from tests.kit.world import on_ranks
from tests.zoo.planned import nbytes

pytestmark = pytest.mark.promise(111)


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
@on_ranks(2)
def test_the_state_of_low_bit_optimizers_is_exact(name: str) -> None:
    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        import torchao.optim

        made: torch.optim.Optimizer = getattr(torchao.optim, name)(model.parameters())
        return made

    model, alone = nn.Linear(256, 64), nn.Linear(256, 64, device="meta")
    optimizer = optimizer_of(model)
    plan = plan_parallelism(alone, FSDP2Config(), world_size=2, optimizer=optimizer_of(alone))
    estimate = plan.memory(rank=dist.get_rank())
    parallelize_model(model, FSDP2Config(), optimizer)
    model(torch.ones(2, 256)).sum().backward()
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    assert estimate.optimizer == nbytes(one for values in optimizer.state.values() for one in values.values())
    assert estimate.optimizer < 2 * estimate.parameters, "two moments of whole floats are twice as large"
    assert plan.memory(torch.empty(2, 256, device="meta")).at_peak.get("activations", 0) < 4 * 256 * 64


def test_a_parameter_without_a_gradient_needs_none_and_no_state() -> None:
    """As LoRA's on matrices whose modules never run; without a batch, that is not known."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    with torch.device("meta"):
        model = Half()
    config = ParallelismConfig(rules=[Rule("used", shard=True), Rule("idle", shard=True)])
    plan = plan_parallelism(model, config, world_size=2, optimizer="AdamW")
    batch = torch.empty(2, 8, device="meta")
    whole, part = plan.memory(), plan.memory(batch)
    assert (whole.gradients, whole.optimizer) == (2 * 128, 2 * 260)
    assert (part.gradients, part.optimizer, part.parameters) == (128, 260, whole.parameters)
