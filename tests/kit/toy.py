"""Models with everything that a state can contain, built alike wherever they are built."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from tests.kit.meshes import mesh_of

M = TypeVar("M", bound=nn.Module)


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
        return self.head(x * self.row * self.scale) + self.shift


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
        return self.head(x, x)


def built(make: Callable[[], nn.Module] = Toy, seed: int = 0, device: str = "cpu") -> Any:
    """A model built from `seed`, on `device`."""
    torch.manual_seed(seed)
    with torch.device(device):
        return make()


def tokens(start: int = 0) -> Tensor:
    """A batch `(4,)`."""
    return torch.arange(start, start + 4) % 16


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


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


class StatefulBlock(nn.Module):
    """A unit: an uneven pair of matrices, a norm with integer state, extra state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 5)
        self.norm = nn.BatchNorm1d(5)
        self.down = nn.Linear(5, 8, bias=False)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.down(self.norm(self.up(x)).relu())

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: Any) -> None:
        self.calls = state


class Stateful(nn.Module):
    """Embedding, blocks, a head tied to the embedding, a frozen scale and two kinds of buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(StatefulBlock() for _ in range(2))
        self.scale = nn.Parameter(torch.randn(8), requires_grad=False)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.randn(16))
        self.register_buffer("table", torch.randn(3), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x * self.scale) + self.shift


def stateful(seed: int = 0) -> Stateful:
    """The model that every rank, and the reference, builds from the same seed."""
    torch.manual_seed(seed)
    return Stateful()


def six_tokens() -> Tensor:
    """A batch `(6,)`."""
    return torch.arange(6) % 16


def sharded(model: M, *, replicas: int = 1, reshard_after_forward: bool | int = True) -> M:
    """`model` under plain FSDP2: a unit per layer, the rest in the root's."""
    mesh = mesh_of(replicas)
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList):
            for layer in module:
                fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh)
    return model


def train_step(model: nn.Module) -> None:
    """One SGD step, the same on every rank."""
    optimizer = torch.optim.SGD(trainable(model), lr=0.1)
    model(six_tokens()).logsumexp(-1).mean().backward()
    optimizer.step()


class Buffers(nn.Module):
    """Buffers of every kind, and tensors as plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5)
        for persistent in (True, False):
            for name, value in {
                "bool": torch.tensor([True, False, True]),
                "int": torch.arange(7) * 3,
                "complex": torch.randn(4, 2, dtype=torch.complex64),
                "half": torch.randn(5).bfloat16(),
                "scalar": torch.tensor(2.5),
                "count": torch.tensor(3),
                "none": torch.empty(0, 4),
                "turned": torch.randn(6, 4).t(),
                "wide": torch.randn(1, 3).expand(4, 3),
            }.items():
                self.register_buffer(f"{name}_{persistent}", value, persistent=persistent)
        self.register_buffer("absent", None)
        self.register_buffer("alias", self.int_True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)
