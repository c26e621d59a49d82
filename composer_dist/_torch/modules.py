"""Modules, their initializers and their optimizers."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import torch
from torch import nn

# Activation checkpointing by a wrapper module, as in Composer, Lightning and torchtune. Since torch 1.12; the
# path is private, but widely used.
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper as CheckpointWrapper
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper as checkpoint_wrapper,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.optim import Optimizer

from composer_dist.errors import ParallelismRuntimeError

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

    `trunc_normal_` is passed to the modes for functions instead, one of which must take it. Since torch 2.13
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


def classes_of_optimizers() -> set[type[Optimizer]]:
    """The classes of the optimizers that this process has made, and maybe others; none if it has made none.

    The first object of each class marks the class's `step` (`Optimizer._patch_step_function`, by another name
    before torch 2.0; since torch 1.5). Classes that are not torch's need not call `Optimizer.__init__`.
    """
    kinds = [Optimizer]
    for kind in kinds:
        kinds += kind.__subclasses__()
    made = {kind for kind in kinds if getattr(kind.step, "hooked", False)}
    return made and made.union(kind for kind in kinds if not kind.__module__.startswith("torch."))


def has_spectral_norm(module: nn.Module, name: str) -> bool:
    """Whether torch's older `spectral_norm` computes an attribute before each forward. Since torch 0.4."""
    hooks = module._forward_pre_hooks.values()
    return any(isinstance(hook, SpectralNorm) and hook.name == name for hook in hooks)


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


@cache
def refuse_pruning(message: str) -> None:
    """Have `torch.nn.utils.prune`, whose masks are whole tensors, refuse sharded parameters. Since torch 1.4.

    Args:
        message: with a place for the parameter.
    """

    def check(module: nn.Module, name: str) -> None:
        if isinstance(module._parameters.get(name), DTensor):
            kind = original_class(type(module)) if isinstance(module, FSDPModule) else type(module)
            raise ParallelismRuntimeError(message.format(f"{name} of a {kind.__name__}"))

    pruning: Any = prune.BasePruningMethod
    applied, removed, of_all = pruning.apply, pruning.remove, prune.global_unstructured

    @wraps(applied)
    def apply(cls: Any, module: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
        check(module, name)
        return applied.__func__(cls, module, name, *args, **kwargs)

    @wraps(removed)
    def remove(self: Any, module: nn.Module) -> None:
        check(module, f"{self._tensor_name}_orig")
        removed(self, module)

    @wraps(of_all)
    def apply_to_all(parameters: Iterable[tuple[nn.Module, str]], *args: Any, **kwargs: Any) -> None:
        parameters = [*parameters]
        for module, name in parameters:
            check(module, name)
        of_all(parameters, *args, **kwargs)

    pruning.apply, pruning.remove = classmethod(apply), remove
    prune.global_unstructured = apply_to_all
