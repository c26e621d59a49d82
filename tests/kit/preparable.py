"""Models for the tests of preparation, and how a prepared one is compared with its reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.mesh import MeshConfig
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.distributed.prepared import named_buffers_canonical, named_parameters_canonical


class Block(nn.Module):
    """Uneven matrices (5 rows), a norm with integer state, a non-persistent table."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 5)
        self.norm = nn.BatchNorm1d(5)
        self.down = nn.Linear(5, 8, bias=False)
        self.register_buffer("table", torch.empty(0), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.table = torch.arange(8.0) / 8

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.norm(self.up(x)).relu()) + self.table


class Toy(nn.Module):
    """An embedding tied to the head, blocks, one frozen row, a scalar."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.row = nn.Parameter(torch.empty(1, 8), requires_grad=False)
        self.scale = nn.Parameter(torch.empty(()))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.empty(16))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.row)
        nn.init.ones_(self.scale)
        self.shift = torch.randn(16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x * self.row * self.scale) + self.shift
        return logits


class Kinds(nn.Module):
    """Modules of torch's own with odd initializers: lists of weights, children's biases, counters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8, padding_idx=0)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.lstm = nn.LSTM(8, 8, num_layers=2, batch_first=True)
        self.norm = nn.BatchNorm1d(8)
        self.conv = nn.Conv1d(8, 3, 2)
        self.head = nn.Bilinear(3, 3, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.attention(x, x, x)[0]
        x = self.norm(self.lstm(x)[0].transpose(1, 2))
        x = self.conv(x).mean(-1)
        out: Tensor = self.head(x, x)
        return out


def built(make: Callable[[], nn.Module] = Toy, seed: int = 0, device: str = "cpu") -> Any:
    """A model built from `seed`, on `device`."""
    torch.manual_seed(seed)
    with torch.device(device):
        return make()


def tokens(start: int = 0) -> Tensor:
    """A batch `(4,)`."""
    return torch.arange(start, start + 4) % 16


def config(**options: Any) -> ParallelismConfig:
    """FSDP2, with small buckets unless told otherwise; `replicas` makes the mesh 2-D."""
    replicas = options.pop("replicas", 1)
    options.setdefault("fsdp2", FSDP2Config())
    options.setdefault("bucket_bytes", 512)
    return ParallelismConfig(mesh=MeshConfig(dp_replicate=replicas), **options)


def full(value: Tensor) -> Tensor:
    """All of a tensor, a copy."""
    value = value.detach()
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.clone()


def values(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter, buffer and tensor attribute by name, in full; tied ones under each name."""
    found = {name: full(p) for name, p in named_parameters_canonical(model, remove_duplicate=False)}
    found |= {name: b.clone() for name, b in named_buffers_canonical(model)}
    return found


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Bit-equal, dtype and layout of names included."""
    assert sorted(found) == sorted(expected)
    different = [
        name
        for name, value in expected.items()
        if found[name].dtype != value.dtype or not torch.equal(found[name], value)
    ]
    assert not different, different


def train(model: nn.Module, optimizers: Any, steps: int = 2, first: int = 0, whole: bool = False) -> None:
    """Steps on a batch that is split over the ranks, or the whole of it for a reference."""
    optimizers = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
    world, rank = (1, 0) if whole or not dist.is_initialized() else (dist.get_world_size(), dist.get_rank())
    model.eval()  # batch norm would see other batches than the reference
    for step in range(first, first + steps):
        batch = tokens(step)[rank * 4 // world : (rank + 1) * 4 // world]
        nn.functional.cross_entropy(model(batch), (batch * 7) % 16).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def close(
    found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-5, atol: float = 1e-6
) -> None:
    """Equal to rounding."""
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )
