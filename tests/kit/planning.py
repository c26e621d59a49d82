"""One part of planning, on one model."""

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.config.rule import Rule
from composer_dist.distributed.activations.options import ac_mode
from composer_dist.distributed.activations.recompute import checkpoint_modules
from composer_dist.distributed.sharding.choose_units import Choices, choose_units
from composer_dist.distributed.wishes import Request, Wishes
from composer_dist.structure.structure import read_structure
from tests.kit.compare import grads

BLOCKS = ["layers.0", "layers.1", "layers.2"]


def choose(model: nn.Module, *rules: Rule, policy: Any = None, **options: Any) -> Choices:
    children = options.pop("children", ())
    config = ParallelismConfig(rules=rules, **options)
    structure = read_structure(model)
    wishes = Wishes.read(Request(config=config, wrap_policy=policy, children=children), structure)
    choices = choose_units(structure, wishes)
    return replace(choices, warnings=tuple(dict.fromkeys([*wishes.warnings, *choices.warnings])))


class DroppingBlock(nn.Module):
    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.attention = nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 8))
        self.calls = 0

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        self.calls += 1
        return x + scale * self.mlp(torch.tanh(self.attention(x)))


class Dropping(nn.Module):
    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(DroppingBlock(dropout) for _ in range(3))
        self.head = nn.Linear(8, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return self.head(x).clone()  # FSDP2 warns of a unit that returns a view


def checkpointed(value: Any, names: list[str] | None = None) -> tuple[Dropping, Dropping]:
    """A model with activation checkpointing, and its copy without."""
    model = Dropping()
    plain = copy.deepcopy(model)
    chosen = ac_mode(value)
    assert chosen is not None
    checkpoint_modules(model, BLOCKS if names is None else names, *chosen)
    return model, plain


def ids() -> torch.Tensor:
    return torch.randint(16, (4, 5), generator=torch.Generator().manual_seed(1))


def dropping_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(5)  # the dropout masks
    model(ids()).square().mean().backward()
    return grads(model)
