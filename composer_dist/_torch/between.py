"""Parameters that FSDP2 keeps gathered between a forward and its backward, as other code finds them there."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from composer_dist._torch.backward import current_backward
from composer_dist._torch.sharding import fsdp_params, registered_param


class _Gathered(torch.Tensor):
    """What belongs to a parameter, and not to its values, is that of the shard, which the optimizer holds.

    Otherwise `model.zero_grad()` there would drop nothing, and what freezes a parameter would be forgotten.
    """

    _composer_dist_shard: nn.Parameter

    @property
    def grad(self) -> torch.Tensor | None:
        return _grad.__get__(self) if current_backward() != -1 else self._composer_dist_shard.grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if current_backward() != -1:
            _grad.__set__(self, value)
        else:
            self._composer_dist_shard.grad = value

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def requires_grad(self) -> bool:
        return bool(_requires_grad.__get__(self))

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> torch.Tensor:
        self._composer_dist_shard.requires_grad_(requires_grad)
        return super().requires_grad_(requires_grad)

    def register_hook(self, hook: Callable[..., Any]) -> Any:
        return self._composer_dist_shard.register_hook(hook)  # which the next forward refuses

    def register_post_accumulate_grad_hook(self, hook: Callable[..., Any]) -> Any:
        return self._composer_dist_shard.register_post_accumulate_grad_hook(hook)


class _GatheredParameter(_Gathered, nn.Parameter):
    pass


class _GatheredDTensor(_Gathered, DTensor):
    pass


_grad: Any = torch.Tensor.grad
_requires_grad: Any = torch.Tensor.requires_grad
_KINDS: dict[type[torch.Tensor], type[_Gathered]] = {
    nn.Parameter: _GatheredParameter,
    DTensor: _GatheredDTensor,
}
_FORMER: dict[type[torch.Tensor], type[torch.Tensor]] = {own: kind for kind, own in _KINDS.items()}


def follow_shards(module: FSDPModule) -> list[torch.Tensor]:
    """After a forward of the unit, have what it keeps gathered act on the shards. Since torch 2.12."""
    kept = []
    for param in fsdp_params(module):
        registered: Any = registered_param(param)
        if registered is not param.sharded_param and type(registered) in _KINDS:
            registered._composer_dist_shard = param.sharded_param
            registered.__class__ = _KINDS[type(registered)]
            kept.append(registered)
    return kept


def end_following(kept: list[torch.Tensor]) -> None:
    """Before the next forward or the backward; empties the list."""
    while kept:
        one = kept.pop()
        one.__class__ = _FORMER[type(one)]


def shard_of(tensor: torch.Tensor) -> nn.Parameter | None:
    """The shard of a parameter that was found gathered; None of others."""
    return getattr(tensor, "_composer_dist_shard", None)


def hook_gathered(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """`register_post_accumulate_grad_hook` of the gathered parameter itself."""
    register: Any = torch.Tensor.register_post_accumulate_grad_hook
    register(tensor, hook)


def kind_of(tensor: torch.Tensor) -> type[torch.Tensor]:
    """The class of a tensor, or the one that a gathered parameter has in a forward."""
    return _FORMER.get(type(tensor), type(tensor))
