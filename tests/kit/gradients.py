"""A model of which FSDP2, HSDP or DDP manages a part, and its gradients beside one process's."""

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from composer_dist import _torch
from composer_dist.distributed.activations.recompute import checkpoint_modules
from composer_dist.distributed.training.average_gradients import average_plain_gradients
from tests.kit import compare
from tests.kit.compare import Tensors, close
from tests.kit.meshes import mesh_of


@dataclass
class Result:
    """An output that no pytree knows."""

    logits: torch.Tensor
    extra: dict[str, torch.Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor, gain: bool = True) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        return x + (y * self.gain if gain else y)


class Toy(nn.Module):
    """Uneven shards (5 rows), two scalar parameters, a plain matrix, a branch that may not run."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.adapter = nn.Linear(6, 6, bias=False)
        self.head = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor, gain: bool = True, adapt: bool = True) -> Result:
        for block in self.blocks:
            x = block(x, gain)
        if adapt:
            x = x + self.adapter(x)
        logits = self.head(x)
        return Result(logits, {"square": logits.square()})


def is_plain(name: str) -> bool:
    return name.endswith("gain") or name.startswith("adapter")


def batch(count: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(8, 6, generator=generator) for _ in range(count)]


def loss_of(result: Any) -> torch.Tensor:
    result = result if isinstance(result, Result) else Result(result, {"square": result.square()})
    return result.logits.mean() + result.extra["square"].mean()


def grads(model: nn.Module) -> Tensors:
    return {name.removeprefix("module."): value for name, value in compare.grads(model).items()}


def reference(model: nn.Module, batches: list[torch.Tensor], **kwargs: Any) -> Tensors:
    for x in batches:
        loss_of(model(x, **kwargs)).backward()
    return grads(model)


def assert_grads(model: nn.Module, expected: Tensors) -> None:
    close(grads(model), expected, rtol=1.3e-6, atol=1e-5)


def prepared(
    kind: str, reshard: bool | int = True, *, recompute: bool = False
) -> tuple[nn.Module, nn.Module]:
    """A toy model prepared in some way, and its unsharded copy."""
    torch.manual_seed(3)
    model = Toy()
    copied = copy.deepcopy(model)
    if kind == "ddp":
        return DistributedDataParallel(model), copied
    if kind == "replicate":
        return _torch.replicate(model), copied
    mesh = mesh_of(2 if kind == "hsdp" else 1)
    plain = {name: p for name, p in model.named_parameters() if is_plain(name)}
    for block in model.blocks:
        if recompute:
            checkpoint_modules(block, [""], "composable", {})
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, ignored_params={*plain.values()})
    fully_shard(model, mesh=mesh, ignored_params={*plain.values()})
    average_plain_gradients(model, plain, mesh)
    return model, copied


def flags(model: nn.Module) -> list[bool]:
    return [
        getattr(owner, name)
        for module in model.modules()
        for owner, name, _ in _torch.gradient_sync_flags(module)
    ]


@contextlib.contextmanager
def collectives() -> Iterator[list[str]]:
    """The names of the gradient collectives that run inside."""
    calls: list[str] = []

    def recorded(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return original(*args, **kwargs)

        original = getattr(dist, name)
        return mock.patch.object(dist, name, call)

    with contextlib.ExitStack() as stack:
        for name in ("all_reduce", "reduce_scatter_single", "reduce_scatter_tensor"):
            if hasattr(dist, name):
                stack.enter_context(recorded(name))
        yield calls
