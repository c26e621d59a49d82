"""Models that cannot be held in 4 bits."""

import pytest
import torch
from torch import Tensor, nn

from composer_dist.errors import ParallelismValueError
from composer_dist.recipe.other_libraries import nf4
from tests.kit.quantized import NF4

pytestmark = [pytest.mark.promise(46), NF4]


class Transposed(nn.Linear):
    """A layer that computes with its weight itself, as Falcon's do."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


class Mixer(nn.Module):
    """Computes with the weight of a layer itself, as Mamba's mixers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(128, 128), nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.to(self.inner.weight.dtype)) @ self.outer.weight


def test_a_weight_that_another_module_computes_with_stays_with_a_warning() -> None:
    model = nn.Sequential(Mixer())
    with pytest.warns(UserWarning, match="NF4 leaves 0.outer as they are"):
        nf4.quantize(model)
    assert type(model[0].outer.weight) is nn.Parameter
    assert type(model[0].inner.weight.data).__name__ == "NF4Tensor"
    assert model(torch.ones(2, 128)).shape == (2, 128)


def test_a_weight_of_another_size_is_refused() -> None:
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 100))
    words = r"NF4 needs weights with a multiple of 16384 elements; 1 have .*, such as 1 of \(100, 128\)"
    with pytest.raises(ParallelismValueError, match=words):
        nf4.quantize(model)
    assert model[0].weight.dtype == torch.float32
    assert type(model[0].weight) is nn.Parameter


def test_a_layer_with_a_forward_of_its_own_is_refused() -> None:
    model = nn.Sequential(nn.Linear(128, 128), Transposed(128, 128))
    with pytest.raises(ParallelismValueError, match="1 have their own, such as 1, a Transposed. Use LoRA"):
        nf4.quantize(model)
    assert type(model[0].weight) is nn.Parameter
