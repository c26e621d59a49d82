"""Modules, their initializers and their optimizers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

# Activation checkpointing by a wrapper module, as Composer, Lightning and torchtune users know it.
# Since torch 1.12; the path is private, the function universal.
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper as CheckpointWrapper
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper as checkpoint_wrapper,
)
from torch.optim import Optimizer

# The classes of all batch norms and of all convolutions. Since torch 0.4.
AnyBatchNorm, AnyConvolution = nn.modules.batchnorm._BatchNorm, nn.modules.conv._ConvNd


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside a checkpoint wrapper, or the module itself."""
    return module._checkpoint_wrapped_module if isinstance(module, CheckpointWrapper) else module


def original_class(sharded: type[nn.Module]) -> type[nn.Module]:
    """The class that a module had before `fully_shard` or `replicate` put two of theirs in front of it."""
    return sharded.__mro__[2]


def is_saved(module: nn.Module, key: str) -> bool:
    """Whether the buffer `key` of a module is part of its `state_dict`. Since torch 1.4."""
    return key not in module._non_persistent_buffers_set


def _overwrite(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return tensor.zero_()


@contextmanager
def all_initializers_write() -> Iterator[None]:
    """Inside, every function of `nn.init` writes to meta tensors too, so that tracing sees that it does.

    Since torch 2.13 these four return at once for them. Their code is exchanged rather than their
    names, because initializers import them by name.
    """
    init = nn.init
    silent = [init._no_grad_trunc_normal_, init.orthogonal_, init.sparse_, init.dirac_]
    before = [(function, function.__code__, function.__defaults__) for function in silent]
    try:
        for function in silent:
            function.__code__, function.__defaults__ = _overwrite.__code__, None
        yield
    finally:
        for function, code, defaults in before:
            function.__code__, function.__defaults__ = code, defaults


def optimizers_were_made() -> bool:
    """Whether this process has made any optimizer so far.

    Each class's `step` is marked when its first object is made (`Optimizer._patch_step_function`, by
    another name before torch 2.0), which saves a search through all objects. Since torch 1.5.
    """
    kinds = [Optimizer]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return any(getattr(kind.step, "hooked", False) for kind in kinds)
