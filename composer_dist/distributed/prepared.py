"""Parameters by their names, as the user wrote the model.

A *name* has no wrapper segments, and a parameter is what the optimizer holds: the shard. FSDP2
registers gathered parameters on the modules between a forward and the next reshard (the root after
an evaluation, every unit with an int `reshard_after_forward`), so everything that walks parameters
goes through `named_parameters_canonical`, which reshards first.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from composer_dist.errors import ParallelismRuntimeError, ParallelismTypeError
from composer_dist.structure.names import canonical_name
from composer_dist.wording import kind_in_words


def reshard(model: nn.Module) -> None:
    """Free every gathered parameter below `model` and register the shards again.

    Raises:
        ParallelismRuntimeError: the model's preparation has failed half way.
    """
    check_usable(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def named_parameters_canonical(
    model: nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """Name and parameter (the shard) of all parameters below `model`, in registration order.

    Args:
        model: prepared or not.
        remove_duplicate: a tied parameter comes once, under its first name; False gives every name.
    """
    reshard(model)
    for name, parameter in model.named_parameters(remove_duplicate=remove_duplicate):
        yield canonical_name(name), parameter


def named_buffers_canonical(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of all buffers below `model`, non-persistent ones included."""
    for name, buffer in model.named_buffers():
        yield canonical_name(name), buffer


_UNUSABLE = "_composer_dist_unusable"


def mark_unusable(model: nn.Module, cause: str) -> None:
    """From now on every call on `model`, its forward included, raises and names `cause`."""
    vars(model)[_UNUSABLE] = cause
    model.register_forward_pre_hook(lambda module, args: check_usable(module), prepend=True)


def check_module(model: object) -> None:
    """Refuse what is no module.

    Raises:
        ParallelismTypeError: says what it is.
    """
    if not isinstance(model, nn.Module):
        raise ParallelismTypeError(f"model must be a torch.nn.Module, not {kind_in_words(model)}.")


def check_usable(model: nn.Module) -> None:
    """Raise if an earlier preparation of `model` failed half way.

    Raises:
        ParallelismTypeError: it is no module.
        ParallelismRuntimeError: names the cause.
    """
    check_module(model)
    cause = vars(model).get(_UNUSABLE)
    if cause is not None:
        raise ParallelismRuntimeError(
            "This model is unusable, because its preparation failed half way; build it anew. "
            f"The cause: {cause}"
        )
