"""Blocks found by structure."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from composer_dist.structure.blocks import has_forward, structural_units
from composer_dist.structure.structure import read_structure
from tests.kit import models


def _blocks(model: nn.Module) -> list[str]:
    return [name for name, _ in structural_units(read_structure(model))]


def in_two_places() -> nn.Module:
    model, block = nn.Module(), models.Block()
    model.layers = nn.ModuleList([block, models.Block(), block])
    return model


@pytest.mark.parametrize(
    ("build", "blocks"),
    [
        (models.B, ["layers.0", "layers.1", "layers.2"]),
        (models.EncoderDecoder, [f"{half}.block.{i}" for half in ("encoder", "decoder") for i in (0, 1)]),
        (models.moe, ["layers.0", "layers.1", "layers.2"]),
        (models.M, ["0", "2"]),
        (models.Shell, ["net.0", "net.2", "net.4"]),
        (models.Composers, []),
        (in_two_places, ["layers.0", "layers.1"]),
        pytest.param(lambda: nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), [], id="may be indexed"),
    ],
)
def test_repeated_blocks(build: Callable[[], nn.Module], blocks: list[str]) -> None:
    assert _blocks(build()) == blocks


def test_no_split_modules_count_alone_and_before_what_repeats_around_them() -> None:
    model = nn.ModuleDict({"stages": nn.ModuleList([nn.Sequential(models.Block()) for _ in range(2)])})
    assert _blocks(model) == ["stages.0", "stages.1"]
    model._no_split_modules = ["Block"]
    assert list(structural_units(read_structure(model))) == [
        (f"stages.{i}.0", "Block is one of the model's _no_split_modules") for i in range(2)
    ]


def test_the_reason_counts_the_siblings() -> None:
    with torch.device("meta"):
        found = dict(structural_units(read_structure(models.B())))
    assert found["layers.1"] == "it is one of 3 Block in layers"


class Called(nn.ModuleList):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_what_can_be_called_can_be_a_unit() -> None:
    assert has_forward(nn.Linear(1, 1))
    assert has_forward(nn.Sequential())
    assert has_forward(Called())
    for bare in (nn.ModuleList(), nn.ModuleDict(), nn.ParameterList(), nn.ParameterDict()):
        assert not has_forward(bare)
