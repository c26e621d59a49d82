"""The recipe's steps one by one, for those who write a recipe of their own.

`parallelize_model` needs none of them. They follow Composer's: shard a model with
`prepare_fully_shard`, then fill it with `meta_init` or `sync_module_states`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composer_dist import _torch
from composer_dist.distributed.mesh.layout import Layout
from composer_dist.distributed.moving.transfer import Cargo, take_slice
from composer_dist.distributed.optimizers.follow import carry_attributes
from composer_dist.distributed.sharding.apply import fsdp_params_by_place
from composer_dist.distributed.weights.initialize import replace
from composer_dist.structure.structure import Held
from composer_dist.tensors.inner import empty_like, local_part


def storage_of(model: nn.Module, held: Held, device: torch.device) -> torch.Tensor:
    """Where a tensor's values go on this rank; made if it has none yet."""
    value = held.get()
    if isinstance(value, DTensor):
        if value.is_meta:
            param = _fsdp_param(model, held)
            home, pin = _torch.shard_home(param, device)
            if held.info.inner:
                local = empty_like(local_part(value), home, pin_memory=pin)
                carry_attributes(value, _torch.adopt_shard(param, local))
                return local
            size, dtype = _torch.padded_shard(param)
            storage = torch.empty(size, dtype=dtype, device=home, pin_memory=pin)
            parameter, local = _torch.materialize_shard(param, storage)
            carry_attributes(value, parameter)
            return local
        return value.to_local().detach()
    if value.is_meta or not value.is_contiguous():
        if held.info.inner:
            replace(held, empty_like(value, device))
        else:
            replace(held, torch.empty(held.info.shape, dtype=held.info.dtype, device=device))
    return held.get().detach()


def _put(model: nn.Module, held: Held, value: torch.Tensor) -> None:
    """Hold a full value: as it is, or this rank's rows of it."""
    now = held.get()
    if not isinstance(now, DTensor):
        return replace(held, value)
    target = storage_of(model, held, value.device)
    take_slice(Cargo(held.info.name, Layout.of(now), held.info.dtype, target, value), now.device_mesh)
    return None


def _fsdp_param(model: nn.Module, held: Held) -> Any:
    places = {place.key_of for place in held.places}
    return next(
        param
        for module in model.modules()
        for key, param in fsdp_params_by_place(module).items()
        if key in places
    )
