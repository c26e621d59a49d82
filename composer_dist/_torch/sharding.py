"""FSDP2: what it knows of units and their parameters, its collectives and its state.

FSDP2 keeps what it knows of each parameter in private objects, reachable from the sharded module. They
are what lets a shard be allocated once, padded as the all-gather wants it, and filled in place.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

# A wrap policy as Composer and FSDP1 users write it; only its function is read. Since torch 2.1.
from torch.distributed.fsdp.wrap import CustomPolicy as CustomPolicy


def policy_function(policy: CustomPolicy) -> Callable[[nn.Module], bool | dict[str, Any]]:
    """The function that a wrap policy was made of."""
    return policy._lambda_fn


def fsdp_param_groups(module: FSDPModule) -> list[Any]:
    """The communication groups of one FSDP2 module, none where it manages no parameter.

    Since torch 2.4; several groups per module since 2.12.
    """
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    return list(groups)


def fsdp_params(module: FSDPModule) -> list[Any]:
    """The `FSDPParam` objects of the unit that `module` is, or leads."""
    return [param for group in fsdp_param_groups(module) for param in group.fsdp_params]


def fsdp_param_place(param: Any) -> tuple[nn.Module, str]:
    """The module, and the key there, under which FSDP2 knows a parameter."""
    return param._module_info.module, param._module_info.param_name


def padded_shard(param: Any) -> tuple[torch.Size, torch.dtype]:
    """Size and dtype of the storage that `materialize_shard` needs: a shard with FSDP2's padding."""
    return param.padded_sharded_param_size, param.sharded_param.dtype


def materialize_shard(param: Any, padded: torch.Tensor) -> tuple[nn.Parameter, torch.Tensor]:
    """Give an `FSDPParam` that was sharded on the meta device the storage `padded`, as `padded_shard` says.

    Returns the registered parameter, a DTensor, and its local tensor: `(rows, ...)`, uninitialized.
    The storage ends in FSDP2's padding, zeroed, so that no later step has to copy the shard.
    """
    size, dim = param.padded_sharded_param_size, param.fsdp_placement.dim
    requires_grad = param.sharded_param.requires_grad
    length = param.sharded_size[dim] if param.sharded_size.numel() else 0
    if length < size[dim]:
        padded.narrow(dim, length, size[dim] - length).zero_()
    local = padded.narrow(dim, 0, length)
    parameter = nn.Parameter(param.to_sharded_dtensor(local), requires_grad=requires_grad)
    param._sharded_param_data = padded.view(-1)
    param.sharded_param = parameter
    param._setattr_on_modules(parameter)
    return parameter, local


def adopt_shard(param: Any, local: torch.Tensor) -> nn.Parameter:
    """Let `local`, of a class with all-gather extensions, be the shard of an `FSDPParam`.

    The parameter may have been sharded as a plain tensor. Returns the registered one, a DTensor.
    """
    parameter = nn.Parameter(param.to_sharded_dtensor(local), requires_grad=False)
    param._sharded_param_data = local.view(-1)
    param.sharded_param = parameter
    param._setattr_on_modules(parameter)
    param._init_extensions()
    return parameter


def shard_home(param: Any, device: torch.device) -> tuple[torch.device, bool]:
    """Where an `FSDPParam` keeps its shard, and whether in pinned memory: host memory with offload."""
    return torch.device("cpu") if param.offload_to_cpu else device, param.pin_memory


def accumulated_nbytes(module: FSDPModule) -> int:
    """Bytes of a unit's whole gradients, in the dtype in which FSDP2 adds them up. Since torch 2.4."""
    return sum(
        param._orig_size.numel() * (group.mp_policy.reduce_dtype or param.sharded_param.dtype).itemsize
        for group in fsdp_param_groups(module)
        for param in group.fsdp_params
        if param.sharded_param.requires_grad
    )


class _Watched:
    """An FSDP2 collective, such as `set_custom_all_gather` takes, that tells somebody before it starts."""

    def __init__(self, collective: Any, tell: Callable[[int, Any], None]) -> None:
        self._collective, self._tell = collective, tell
        self.allocate = collective.allocate

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
        self._tell(input_tensor.numel(), group)
        return self._collective(output_tensor, input_tensor, group, *args, **kwargs)


def before_collectives(module: nn.Module, tell: Callable[[bool, int, list[Any]], None]) -> None:
    """Have `tell(reduces, numel, groups)` called before each collective of the FSDP2 unit `module`.

    `numel` is the length of what this rank sends; `groups` are those over which it goes, the replicas' after
    the shards' where gradients are all-reduced next. The present collectives are kept inside, to which
    there is no public way. Since torch 2.9.
    """
    for group in fsdp_param_groups(module) if isinstance(module, FSDPModule) else ():

        def gathers(numel: int, shards: Any) -> None:
            tell(False, numel, [shards])

        def reduces(numel: int, shards: Any, group: Any = group) -> None:
            replicas = group.all_reduce_grads and group.mesh_info.replicate_mesh_dim is not None
            tell(True, numel, [shards, group._all_reduce_process_group] if replicas else [shards])

        group._all_gather_comm = _Watched(group._all_gather_comm, gathers)
        group._reduce_scatter_comm = _Watched(group._reduce_scatter_comm, reduces)


def forget_iteration(model: nn.Module) -> None:
    """Bring FSDP2 below `model` back to where a forward may begin, after one or a backward has raised.

    Whole gradients that were waiting to be reduced are dropped too, which torch's own reset leaves in
    place. `reset_iter_state` is public since torch 2.13; of older versions there is none.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        if unit._get_fsdp_state()._is_root:
            unit.reset_iter_state()
        for param in fsdp_params(unit):
            param.unsharded_accumulated_grad = None
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None


forgets_iterations = hasattr(FSDPModule, "reset_iter_state")
"""Whether `forget_iteration` works in this version of torch."""


def finish_lazily(root: FSDPModule) -> None:
    """Run FSDP2's lazy initialization now, so that its checks speak before the first forward.

    It also settles which module is the root, so that a submodule may be called first (an encoder by
    `generate`, say) without becoming a root of its own.
    """
    root._get_fsdp_state()._lazy_init()
