"""Hooks on the forward of a unit, in addition to FSDP2's own: for outputs, batch norms and evaluation."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from composer_dist import _torch
from composer_dist.distributed import forwards
from composer_dist.distributed.prepared import reshard
from composer_dist.tensors.nested import replace_tensors, tensors_in


def own_outputs(unit: nn.Module, traced: bool = False) -> None:
    """Make `unit` return no views; call this after `fully_shard`.

    FSDP2 hooks the outputs of a unit to gather its parameters again before backward. If an output is a view
    (a Linear with a bias returns one for sequences on CPU), an in-place operation of the caller would remove
    the hook, so torch 2.13 warns at every forward. It stays on a tensor that shares the memory but is not a
    view for autograd.

    Args:
        unit: a unit of FSDP2's.
        traced: whether torch.compile compiles an outer module; the hook is then not compiled.
    """
    hook = torch.compiler.disable(_replace_views) if traced else _replace_views
    unit.register_forward_hook(hook, prepend=True)  # before FSDP2 hooks the outputs


def _replace_views(module: nn.Module, args: Any, output: Any) -> Any:
    if not torch.is_grad_enabled() or not any(map(_is_view, tensors_in(output))):
        return output
    return replace_tensors(without_view, output)


def without_view(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or one with the same memory that is not a view for autograd and may be changed in place."""
    own: torch.Tensor = _Own.apply(tensor) if _is_view(tensor) else tensor  # type: ignore[no-untyped-call]
    return own


def _is_view(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and _torch.is_view(tensor)


class _Own(torch.autograd.Function):
    """The identity; its result shares memory with the input but is not a view of it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def normalize_in_own_dtype(norm: nn.Module) -> None:
    """Have a batch norm compute with its parameters in the dtype of its running statistics.

    FSDP2 gathers the parameters in a low dtype, but not the statistics, and torch's kernel for CPUs refuses
    the mixture (2.13). The result is that of autocast, which casts neither.
    """
    forwards.add(norm, forwards.Layer.PARTS, functools.partial(functools.partial, _in_own_dtype))


def _in_own_dtype(norm: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    gathered = dict(norm._parameters)
    norm._parameters.update(
        {key: p.to(norm.running_mean.dtype) for key, p in gathered.items() if p is not None}
    )
    try:
        return forward(*args, **kwargs)
    finally:
        norm._parameters.update(gathered)


def parametrize_in_own_dtype(parametrization: nn.Module) -> None:
    """Have a parametrization compute in the dtype of its buffers (spectral_norm's vectors), as autocast does.

    FSDP2 gathers the parameter in a low dtype, but not the buffers. The result has the parameter's dtype.
    """
    if any(one.is_floating_point() for one in parametrization.buffers()):
        wrap = functools.partial(functools.partial, _through_own_dtype)
        forwards.add(parametrization, forwards.Layer.PARTS, wrap)


def _through_own_dtype(parametrization: Any, forward: Callable[..., Any], *gathered: torch.Tensor) -> Any:
    dtype = next(one.dtype for one in parametrization.buffers() if one.is_floating_point())
    own: torch.Tensor = forward(*(one.to(dtype) if one.is_floating_point() else one for one in gathered))
    return own.to(gathered[0].dtype)


_gathered: ContextVar[bool] = ContextVar("gathered", default=False)


@contextmanager
def stay_gathered(model: nn.Module) -> Iterator[None]:
    """Inside, units that stay gathered after forward also do so after a forward without gradients.

    Afterwards all units of the model are sharded.
    """
    token = _gathered.set(True)
    try:
        yield
    finally:
        _gathered.reset(token)
        reshard(model)


def reshard_after_evaluation(unit: FSDPModule) -> None:
    """Make `unit` reshard after each forward without gradients.

    FSDP2 keeps the root, and every unit that does not reshard after forward, gathered until backward. An
    evaluation has no backward, so a later optimizer step would change the shards, but the next forward would
    still use the old gathered weights.
    """

    def reshard_unit(module: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled() and not _gathered.get():
            unit.reshard()

    cast(nn.Module, unit).register_forward_hook(reshard_unit)
