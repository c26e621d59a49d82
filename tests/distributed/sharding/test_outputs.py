"""A unit's outputs can be changed in place, and cost no warning and no copy."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from composer_dist import FSDP2Config
from composer_dist.distributed import parallelize_model
from composer_dist.distributed.sharding.hooks import own_outputs
from composer_dist.errors import ParallelismRuntimeError
from tests.kit.compare import fails, same_parameters
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


class Collects(nn.Linear):
    """Writes what it has seen into the list or dict that it is handed."""

    def forward(self, x: torch.Tensor, kept: Any) -> torch.Tensor:  # type: ignore[override]
        if isinstance(kept, dict):
            kept[len(kept)] = x
        else:
            kept.append(x)
        return super().forward(x)


class Collecting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Collects(3, 3) for _ in range(3))

    def forward(self, x: torch.Tensor, kept: Any) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, kept)
        return x


@on_ranks(2)
@pytest.mark.parametrize("precision", [None, "amp_bf16"])
@pytest.mark.parametrize("inside", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_what_blocks_write_into_their_arguments_arrives_without_gradients_too(
    precision: str | None, inside: Any
) -> None:
    reference, model = built(Collecting), built(Collecting)
    parallelize_model(model, FSDP2Config(), precision=precision)
    x = torch.ones(2, 3)
    for kept, expected in (([], []), ({}, {})):
        with inside():
            model(x, kept)
            reference(x, expected)
        found, wanted = (list(one.values() if isinstance(one, dict) else one) for one in (kept, expected))
        assert len(found) == 3
        torch.testing.assert_close([one.float() for one in found], wanted, rtol=0.02, atol=0.01)


class Yields(nn.Module):
    """A forward that computes when its caller asks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
            yield x


@on_ranks(2)
def test_a_forward_that_is_a_generator_is_refused() -> None:
    model = nn.Sequential(Yields())
    parallelize_model(model, FSDP2Config(), fsdp_wrap_policy=lambda module: isinstance(module, Yields))
    with fails(ParallelismRuntimeError, "The forward of 0 is a generator", "Return a list of what it yields"):
        model(torch.ones(2, 4))
