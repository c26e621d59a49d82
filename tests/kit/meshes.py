"""Every kind of mesh, and training on it that takes the same steps, bit for bit, as one process."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor, nn

from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.mesh import MeshConfig
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.config.replicate import DDPConfig
from composer_dist.config.tensor_parallel import TPConfig
from composer_dist.distributed.moving.into import scatter_into
from composer_dist.distributed.prepared import named_parameters_canonical

MODES: dict[str, tuple[int, ParallelismConfig]] = {
    "fsdp": (2, ParallelismConfig(fsdp2=FSDP2Config())),
    "fsdp 4": (4, ParallelismConfig(fsdp2=FSDP2Config())),
    "hsdp": (4, ParallelismConfig(mesh=MeshConfig(dp_replicate=2))),
    "tp": (2, ParallelismConfig(mesh=MeshConfig(dp_shard=1, tp=2), tp=TPConfig())),
    "fsdp x tp": (4, ParallelismConfig(mesh=MeshConfig(tp=2), tp=TPConfig())),
    "hsdp x tp": (4, ParallelismConfig(mesh=MeshConfig(dp_replicate=2, dp_shard=1, tp=2), tp=TPConfig())),
    "ddp": (2, ParallelismConfig(ddp=DDPConfig())),
    "cp": (2, ParallelismConfig(mesh=MeshConfig(dp_shard=1, cp=2))),
    "fsdp x cp": (4, ParallelismConfig(mesh=MeshConfig(dp_shard=2, cp=2))),
}
"""Number of ranks, and the configuration."""


def give_gradients(model: nn.Module, step: int) -> None:
    """Gradients that depend on the parameter's name and the step alone; none for the frozen."""
    for name, parameter in named_parameters_canonical(model):
        if parameter.requires_grad:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + step)
            full = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.grad = torch.empty_like(parameter)
            scatter_into(parameter.grad, full)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, steps: int) -> None:
    """Steps from number `first` on."""
    for step in range(first, first + steps):
        give_gradients(model, step)
        optimizer.step()
        optimizer.zero_grad()


def equal(found: Any, expected: Any, path: str = "") -> None:
    """Bit-equal tensors, equal values, the same keys in the same order."""
    if isinstance(expected, dict):
        assert list(found) == list(expected), path
        for key, value in expected.items():
            equal(found[key], value, f"{path}/{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), path
        for number, value in enumerate(expected):
            equal(found[number], value, f"{path}/{number}")
    elif isinstance(expected, Tensor):
        assert type(found) is Tensor, path
        assert (found.dtype, found.shape, found.device.type) == (expected.dtype, expected.shape, "cpu"), path
        assert torch.equal(found, expected), path
    else:
        assert found == expected, path
