"""Activation offloading."""

import contextlib
import sys
from collections.abc import Set
from dataclasses import dataclass, field
from traceback import extract_tb
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composer_dist import _torch
from composer_dist.errors import ParallelismRuntimeError


class HostSaved:
    """Keeps what autograd saves during a module's forward in host memory.

    Hooks begin and end the region. They run outside the recomputed forward and inside FSDP2's hooks, which
    `fully_shard` adds later.
    """

    def __init__(self, module: nn.Module, pin_memory: bool, host: str) -> None:
        self._pin_memory, self._host = pin_memory, host
        self._open: list[contextlib.AbstractContextManager[Any]] = []
        module.register_forward_pre_hook(self._enter, prepend=True)
        module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: nn.Module, args: Any) -> None:
        # Parameters are not activations, and FSDP2 frees and gathers its own.
        local = (p for p in module.parameters() if not isinstance(p, DTensor))
        kept = {_torch.storage_key(parameter) for parameter in local}
        region = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: to_host(tensor, kept, self._pin_memory, self._host), unpack
        )
        region.__enter__()
        self._open.append(region)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if output is None and isinstance(error := sys.exception(), RuntimeError):
            explain(error, module)
        if self._open:  # empty where an earlier hook failed before `_enter`
            self._open.pop().__exit__(None, None, None)


def explain(error: RuntimeError, module: nn.Module) -> None:
    """Add to torch's error which module cannot have its activations recomputed or offloaded, and why."""
    if "support saved tensor hooks" in str(error) and not hasattr(error, "__notes__"):
        error.add_note(
            f"A {type(module).__name__} that is recomputed or offloaded calls torch.func.grad (or another "
            "transform) in its forward, which torch does not support. Leave the module out of activation "
            "checkpointing, or call torch.autograd.grad instead."
        )
    frames = extract_tb(error.__traceback__) if isinstance(error, RecursionError) else ()
    if any("_pytree" in frame.filename for frame in frames):
        raise ParallelismRuntimeError(
            f"A {type(module).__name__} that is recomputed is handed a container that contains itself, which "
            "torch's checkpoint searches without end. Remove the reference, or leave the module out of "
            "activation checkpointing."
        ) from error


@dataclass
class Packed:
    """A tensor that is saved for backward."""

    tensor: torch.Tensor
    home: torch.device | None
    """The device that it was on; None if it was not moved."""
    version: int
    aliases: list["Packed"] = field(default_factory=list)
    """Tensors with the same memory and a version of their own, which must not change either."""


def stay(tensor: torch.Tensor) -> Packed:
    """Save the tensor without moving it."""
    return Packed(tensor, None, _torch.version(tensor))


def to_host(
    tensor: torch.Tensor, kept: Set[int] = frozenset(), pin_memory: bool = False, host: str = "cpu"
) -> Packed:
    """Save the tensor in host memory, unless it is there already or `kept` has its `storage_key`."""
    stays = tensor.device.type == host or tensor.layout is not torch.strided
    if stays or isinstance(tensor, DTensor) or _torch.storage_key(tensor) in kept:
        return stay(tensor)
    copy = torch.empty_like(tensor, device=host, pin_memory=pin_memory and host == "cpu")
    copy.copy_(tensor, non_blocking=pin_memory)
    return Packed(copy, tensor.device, 0)


def unpack(packed: Packed) -> torch.Tensor:
    """The saved tensor on its own device.

    It is refused if it was not copied and has changed since; autograd does not check this for tensors that
    hooks save.
    """
    tensor = packed.tensor
    if packed.home is not None:
        return tensor.to(packed.home, non_blocking=tensor.is_pinned())
    for one in (packed, *packed.aliases):
        if (now := _torch.version(one.tensor)) != one.version:
            raise ParallelismRuntimeError(
                f"A tensor of shape {tuple(tensor.shape)} that backward needs was changed in place "
                "after forward saved it. Use an operation that returns a new tensor (relu for relu_), or, if "
                "torch changes it, as in a GRU, activation_checkpointing='composable'. "
                f"It is at version {now}; expected version {one.version}."
            )
    return tensor
