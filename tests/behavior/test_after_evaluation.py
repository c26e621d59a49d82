"""P103: what an evaluation leaves behind does not show in any step after it."""

import pytest
import torch
from torch import nn

from composer_dist import FSDP2Config
from composer_dist.distributed import clip_grad_norm, parallelize_model
from tests.kit import models
from tests.kit.world import run


def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Backward, then an evaluation, then clipping and the step: three times; the losses seen."""
    seen = []
    for step in range(3):
        batch = torch.arange(step, step + 12).view(2, 6) % 16
        loss = model(batch).square().mean()
        loss.backward()
        with torch.no_grad():
            seen.append(model(batch).square().mean().item())
        seen.append(float(clip_grad_norm(list(model.parameters()), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            seen.append(model(batch).square().mean().item())
    return seen


def both(reshard: bool | int) -> tuple[list[float], list[float]]:
    torch.manual_seed(3)
    model = models.B()
    torch.manual_seed(3)
    reference = models.B()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.05) for each in (model, reference)]
    parallelize_model(model, FSDP2Config(reshard_after_forward=reshard), optimizers[0])
    return steps(model, optimizers[0]), steps(reference, optimizers[1])


@pytest.mark.promise(103)
@pytest.mark.parametrize(("ranks", "reshard"), [(2, True), (2, False), (4, 2)])
def test_a_step_after_an_evaluation_is_seen_by_the_next_forward(ranks: int, reshard: bool | int) -> None:
    for found, expected in run(both, ranks, reshard):
        assert found == pytest.approx(expected, rel=1e-4)
        assert expected[0] != pytest.approx(expected[2], rel=1e-2)  # the step changes the loss
