"""Small models with everything that a state can contain, built alike wherever they are built."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from composer_dist import _torch
from composer_dist.distributed.moving import whole as collect

M = TypeVar("M", bound=nn.Module)

TOKENS, WIDTH, UNEVEN = 16, 8, 5


class Block(nn.Module):
    """A unit: an uneven pair of matrices, a norm with integer state, extra state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, UNEVEN)
        self.norm = nn.BatchNorm1d(UNEVEN)
        self.down = nn.Linear(UNEVEN, WIDTH, bias=False)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.down(self.norm(self.up(x)).relu())

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: Any) -> None:
        self.calls = state


class Toy(nn.Module):
    """Embedding, blocks, a head tied to the embedding, a frozen scale and two kinds of buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.scale = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.randn(TOKENS))
        self.register_buffer("table", torch.randn(3), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x * self.scale) + self.shift
        return logits


def toy(seed: int = 0) -> Toy:
    """The model that every rank, and the reference, builds from the same seed."""
    torch.manual_seed(seed)
    return Toy()


def tokens() -> Tensor:
    """A batch `(6,)`."""
    return torch.arange(6) % TOKENS


def sharded(model: M, *, replicas: int = 1, reshard_after_forward: bool | int = True) -> M:
    """`model` under plain FSDP2: a unit per layer, the rest in the root's."""
    world = torch.distributed.get_world_size()
    shape, names = ((world,), ("dp_shard",))
    if replicas > 1:
        shape, names = ((replicas, world // replicas), ("dp_replicate", "dp_shard"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList):
            for layer in module:
                fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh)
    return model


def train_step(model: nn.Module) -> None:
    """One SGD step, the same on every rank."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(tokens()).logsumexp(-1).mean().backward()
    optimizer.step()


def assert_equal(state: dict[str, Any], reference: dict[str, Any]) -> None:
    """Same names in the same order, same dtypes, bit-equal CPU values."""
    assert list(state) == list(reference)
    for name, expected in reference.items():
        if isinstance(expected, Tensor):
            assert type(state[name]) is Tensor, name
            assert state[name].device.type == "cpu", name
            assert state[name].dtype == expected.dtype, name
            assert torch.equal(state[name], expected), name
        else:
            assert state[name] == expected, name


@contextmanager
def messages(bucket_bytes: int = collect.BUCKET_BYTES) -> Iterator[list[int]]:
    """Inside, buckets have this size; the bytes of each message that this rank gives to be gathered."""
    sent: list[int] = []
    send_to, all_gather = collect._send_to, _torch.all_gather_single

    def counted_send(root: int, ranks: Any, message: Tensor, joined: Any) -> None:
        sent.append(message.nbytes)
        send_to(root, ranks, message, joined)

    def counted_gather(joined: Tensor, message: Tensor, group: Any) -> None:
        sent.append(message.nbytes)
        all_gather(joined, message, group=group)

    with (
        mock.patch.object(collect, "_send_to", counted_send),
        mock.patch.object(_torch, "all_gather_single", counted_gather),
        mock.patch.object(collect, "BUCKET_BYTES", bucket_bytes),
    ):
        yield sent
