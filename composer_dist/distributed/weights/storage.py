"""Memory for tensors that have none yet: whole ones, shards of FSDP2 and parts of tensor parallelism."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composer_dist import _torch
from composer_dist.distributed.optimizers.follow import carry_attributes
from composer_dist.distributed.sharding.apply import fsdp_params_by_place
from composer_dist.structure.structure import Held, Structure
from composer_dist.tensors.inner import codec_of, dtensor_like, empty_like, local_part


def give_memory(structure: Structure, names: Iterable[str], device: torch.device) -> None:
    """Allocate tensors that are on the meta device, and whole ones that are not contiguous, on `device`.

    Shards of units with offload are in host memory instead.
    """
    modules = structure.modules.values()
    fsdp = {key: param for module in modules for key, param in fsdp_params_by_place(module).items()}
    for name in names:
        held = structure.tensors[name]
        now = held.get()
        if isinstance(now, DTensor) and now.is_meta:
            param = next((fsdp[place.key_of] for place in held.places if place.key_of in fsdp), None)
            new = _new_part(held, now, device) if param is None else _new_shard(param, now, device)
            carry_attributes(now, new)
        elif now.is_meta or not (isinstance(now, DTensor) or now.is_contiguous()):
            make_anew(held, device)


def _new_shard(param: Any, now: DTensor, device: torch.device) -> nn.Parameter:
    """FSDP2's new parameter for one that is on the meta device."""
    home, pin = _torch.shard_home(param, device)
    local = local_part(now)
    if codec_of(local) is not None:
        return _torch.adopt_shard(param, empty_like(local, home, pin_memory=pin))
    size, dtype = _torch.padded_shard(param)
    padded = torch.empty(size, dtype=dtype, device=home, pin_memory=pin)
    return _torch.materialize_shard(param, padded)[0]


def _new_part(held: Held, now: DTensor, device: torch.device) -> nn.Parameter:
    """A new parameter for one that is cut by tensor parallelism alone."""
    local = torch.empty(local_part(now).shape, dtype=now.dtype, device=device)
    parameter = nn.Parameter(dtensor_like(local, now), requires_grad=held.info.requires_grad)
    held.put(parameter)
    return parameter


def make_anew(held: Held, device: torch.device) -> None:
    """Hold a new, uninitialized, whole tensor in place of this one."""
    info = held.info
    plain = None if info.inner else torch.empty(info.shape, dtype=info.dtype, device=device)
    replace(held, empty_like(held.get(), device) if plain is None else plain)


def replace(held: Held, value: torch.Tensor) -> None:
    """Hold `value` wherever a tensor is held; a parameter keeps its attributes and hooks."""
    if held.info.kind == "parameter":
        parameter = nn.Parameter(value, requires_grad=held.info.requires_grad)
        carry_attributes(held.get(), parameter)
        value = parameter
    held.put(value)
    for place in held.places:
        if isinstance(place.module, nn.RNNBase):  # keeps its weights in a list as well
            setattr(place.module, place.key, value)
