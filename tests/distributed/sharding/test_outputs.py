"""A unit's outputs can be changed in place, and cost no warning and no copy."""

import pytest
import torch
from torch import nn

from composer_dist import FSDP2Config
from composer_dist.distributed import parallelize_model
from composer_dist.distributed.sharding.hooks import own_outputs
from tests.kit.compare import same_parameters
from tests.kit.toy import built
from tests.kit.world import on_ranks

pytestmark = pytest.mark.promise(104)


class Views(nn.Module):
    """Returns a view in a nest, beside tensors that are none."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        logits = self.head(x.flatten(0, 1)).view(2, 5, 4)
        return {"logits": logits, "parts": (logits.clone(), x), "note": "as it was"}


def test_views_become_tensors_over_the_same_memory() -> None:
    model, x = Views(), torch.randn(2, 5, 3)
    assert model(x)["logits"]._base is not None
    own_outputs(model)
    found = model(x)
    assert found["logits"]._base is None
    assert found["parts"][1] is x
    assert found["note"] == "as it was"
    found["logits"].sum().backward()
    assert torch.allclose(model.head.bias.grad, torch.full((4,), 10.0))
    with torch.no_grad():
        assert not model(x)["logits"].requires_grad


@on_ranks(2)
def test_an_output_changed_in_place_still_gathers_for_backward() -> None:
    reference, model = (built(lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))) for _ in range(2))
    parallelize_model(model, FSDP2Config(reshard_after_forward=True))
    for each in (reference, model):
        output = each(torch.ones(2, 5, 3))
        output += 1
        output.square().sum().backward()
    same_parameters(model, reference, gradients=True)
