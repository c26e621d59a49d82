"""Modules, their initializers and their optimizers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

# Activation checkpointing by a wrapper module, as in Composer, Lightning and torchtune. Since torch 1.12; the
# path is private, but widely used.
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper as CheckpointWrapper
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper as checkpoint_wrapper,
)
from torch.optim import Optimizer

# The base classes of batch norms and of convolutions. Since torch 0.4.
AnyBatchNorm, AnyConvolution = nn.modules.batchnorm._BatchNorm, nn.modules.conv._ConvNd


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside a checkpoint wrapper, or the module itself."""
    return module._checkpoint_wrapped_module if isinstance(module, CheckpointWrapper) else module


def original_class(sharded: type[nn.Module]) -> type[nn.Module]:
    """The class of a module before `fully_shard` or `replicate` put two of their own before it."""
    return sharded.__mro__[2]


def is_saved(module: nn.Module, key: str) -> bool:
    """Whether a module's `state_dict` includes its buffer `key`. Since torch 1.4."""
    return key not in module._non_persistent_buffers_set


def _overwrite(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return tensor.copy_(tensor.new_empty(()))  # with values that no trace knows


# Fills a tensor with numbers from a truncated normal distribution. Since torch 1.3.
trunc_normal_: Callable[..., torch.Tensor] = nn.init._no_grad_trunc_normal_


def _ask_modes(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    function = torch.nn.init._no_grad_trunc_normal_
    return torch.overrides.handle_torch_function(function, (tensor,), tensor, *args, **kwargs)


@contextmanager
def all_initializers_write() -> Iterator[None]:
    """Inside, all functions of `nn.init` also write to meta tensors, so that tracing sees the writes.

    `trunc_normal_` is told to the modes for functions instead, of which one must take it. Since torch 2.13
    these four return early for meta tensors. Their code is replaced instead of their names, because
    initializers import them by name.
    """
    silent: list[Any] = [trunc_normal_, nn.init.orthogonal_, nn.init.sparse_, nn.init.dirac_]
    before = [(function, function.__code__, function.__defaults__) for function in silent]
    try:
        for function in silent:
            new = _ask_modes if function is trunc_normal_ else _overwrite
            function.__code__, function.__defaults__ = new.__code__, None
        yield
    finally:
        for function, code, defaults in before:
            function.__code__, function.__defaults__ = code, defaults


def takes_hooks(optimizer: Optimizer) -> bool:
    """Whether `Optimizer.__init__` was called, which wrappers may leave out. Since torch 2.0."""
    return "_optimizer_step_pre_hooks" in vars(optimizer)


def optimizers_were_made() -> bool:
    """Whether this process has created any optimizer.

    The first object of each class marks the class's `step` (`Optimizer._patch_step_function`, by another name
    before torch 2.0), so no search through all objects is needed. Since torch 1.5.
    """
    kinds = [Optimizer]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return any(getattr(kind.step, "hooked", False) for kind in kinds)


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_LIBRARIES = ("composer_dist.", "torch.distributed.")


def call_with_own_hooks(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module with the hooks of this library and of FSDP2 only, which a direct forward would not run.

    Since torch 2.0.
    """
    all_of_them = [(hooks, dict(hooks)) for hooks in (vars(module)[kind] for kind in _HOOKS)]
    for hooks, before in all_of_them:
        for key in [key for key, hook in before.items() if not _is_of_libraries(hook)]:
            del hooks[key]
    try:
        return nn.Module.__call__(module, *args, **kwargs)
    finally:
        for hooks, before in all_of_them:
            before.update(hooks)
            hooks.clear()
            hooks.update(before)


def _is_of_libraries(hook: Any) -> bool:
    return str(getattr(hook, "__module__", None)).startswith(_OF_LIBRARIES)
