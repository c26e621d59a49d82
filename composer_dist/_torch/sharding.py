"""FSDP2: its records of units and parameters, its collectives and its state.

FSDP2 records each parameter in a private object, which the sharded module refers to. With these objects a
shard is allocated once, with the padding that the all-gather needs, and filled in place.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from math import prod
from typing import Any, cast

import torch
from torch import nn
from torch._prims_common import make_contiguous_strides_for
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._common_utils import collect_grad_tensors
from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_param

# FSDP2's record of a parameter. Since torch 2.4.
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

# The wrap policy of Composer and FSDP1; only its function is used. Since torch 2.1.
from torch.distributed.fsdp.wrap import CustomPolicy as CustomPolicy
from torch.utils.hooks import RemovableHandle


def policy_function(policy: CustomPolicy) -> Callable[[nn.Module], bool | dict[str, Any]]:
    """The function of a wrap policy."""
    return policy._lambda_fn


def fsdp_param_groups(module: FSDPModule) -> list[Any]:
    """The communication groups of one FSDP2 module. Since torch 2.12, which may have several per module."""
    return list(module._get_fsdp_state()._fsdp_param_groups)


def is_one_of_several(module: FSDPModule) -> bool:
    """Whether the unit of `module` has others too, which are gathered with it. Since torch 2.4."""
    return len(module._get_fsdp_state()._modules) > 1


def fsdp_params(module: FSDPModule) -> list[Any]:
    """The `FSDPParam` objects of the unit that `module` leads."""
    return [param for group in fsdp_param_groups(module) for param in group.fsdp_params]


def fsdp_param_place(param: Any) -> tuple[nn.Module, str]:
    """The module and key of a parameter, by FSDP2's record."""
    return param._module_info.module, param._module_info.param_name


def sharded_param(param: Any) -> nn.Parameter:
    """This rank's part of the parameter of an `FSDPParam`, as the optimizer knows it. Since torch 2.4."""
    sharded: nn.Parameter = param.sharded_param
    return sharded


def registered_param(param: Any) -> nn.Parameter | None:
    """What is registered in place of the parameter of an `FSDPParam` now."""
    place = param._module_info
    found: nn.Parameter | None = place.module._parameters.get(place.param_name)
    return found


def is_untouched(param: Any) -> bool:
    """Whether the part of an `FSDPParam` is registered, without gradient hooks. Since torch 2.4."""
    place, sharded = param._module_info, param.sharded_param
    registered = place.module._parameters.get(place.param_name)
    return registered is sharded and not sharded._backward_hooks


def shard_after_forward(param: Any) -> nn.Parameter | None:
    """The part of an `FSDPParam` that FSDP2 keeps for backward if it does not reshard over all ranks."""
    found: nn.Parameter | None = getattr(param, "_sharded_post_forward_param", None)
    return found


def gathered_param(param: Any) -> torch.Tensor | None:
    """The whole parameter of an `FSDPParam`, as a forward reads it; None if sharded. Since torch 2.4."""
    return param._unsharded_param if param.sharded_state == ShardedState.UNSHARDED else None


def gathered_params(params: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The whole parameters of `FSDPParam`s, by name, without those that are sharded. Since torch 2.4."""
    unsharded = ShardedState.UNSHARDED
    return {name: one._unsharded_param for name, one in params.items() if one.sharded_state is unsharded}


def has_gathered(module: FSDPModule) -> bool:
    """Whether a unit is gathered now. Since torch 2.4."""
    return any(group.is_unsharded for group in fsdp_param_groups(module))


def register_shards(groups: Iterable[Any]) -> None:
    """Have other code find the shards, which the optimizer holds, while a unit stays gathered."""
    for group in groups:
        if not group.is_sharded:
            for param in group.fsdp_params:
                param._setattr_on_modules(param.sharded_param)
            getattr(group, _PUT, bool)()


def register_gathered(groups: Iterable[Any]) -> None:
    """The inverse of `register_shards`, for units that are gathered."""
    for group in groups:
        if group.is_unsharded:
            for param in group.fsdp_params:
                if param._unsharded_param.requires_grad != param.sharded_param.requires_grad:
                    param._unsharded_param.requires_grad_(param.sharded_param.requires_grad)
                param._setattr_on_modules(param._unsharded_param)
            getattr(group, _TAKE, bool)()


def gather_for_call(module: Any, part: nn.Module) -> None:
    """Have one call of a part of a unit that is gathered, which begins now, find the gathered parameters."""
    handles: list[RemovableHandle] = []
    groups = fsdp_param_groups(module)

    def after(part: nn.Module, args: Any, output: Any) -> None:
        handles.pop().remove()
        register_shards(groups)

    register_gathered(groups)
    handles.append(part.register_forward_hook(after, always_call=True))


@contextmanager
def cheap_shards() -> Iterator[None]:
    """Inside, FSDP2 shards parameters on the meta device faster.

    torch computes strides, and zeros on the meta device, in Python that supports symbolic shapes. FSDP2 needs
    both for every parameter; its shapes are numbers, and its zeros have no values there. Since torch 2.4.
    """
    fsdp, cls, new_zeros = cast(Any, _fsdp_param), cast(Any, torch.Tensor), torch.Tensor.new_zeros

    def of_numbers(shape: torch.Size) -> tuple[int, ...]:
        return tuple(prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))

    def empty(tensor: torch.Tensor, *size: Any, **options: Any) -> torch.Tensor:
        if tensor.is_meta and type(tensor) in (torch.Tensor, nn.Parameter) and not options:
            return torch.empty(*size, dtype=tensor.dtype, device="meta")
        return new_zeros(tensor, *size, **options)

    fsdp.make_contiguous_strides_for, cls.new_zeros = of_numbers, empty
    try:
        yield
    finally:
        fsdp.make_contiguous_strides_for = make_contiguous_strides_for
        with suppress(AttributeError):  # another thread's end has been here
            del cls.new_zeros


def padded_shard(param: Any) -> tuple[torch.Size, torch.dtype]:
    """Size and dtype of the storage for `materialize_shard`: a shard with FSDP2's padding."""
    return param.padded_sharded_param_size, param.sharded_param.dtype


def materialize_shard(param: Any, padded: torch.Tensor) -> tuple[nn.Parameter, torch.Tensor]:
    """Give an `FSDPParam` that was sharded on the meta device the storage `padded` (see `padded_shard`).

    Returns the registered parameter, a DTensor, and its local tensor: `(rows, ...)`, uninitialized. FSDP2's
    padding at the end of the storage is set to zero, so that no later step needs to copy the shard.
    """
    size, dim = param.padded_sharded_param_size, param.fsdp_placement.dim
    requires_grad = param.sharded_param.requires_grad
    length = param.sharded_size[dim] if param.sharded_size.numel() else 0
    if length < size[dim]:
        padded.narrow(dim, length, size[dim] - length).zero_()
    local = padded.narrow(dim, 0, length)
    return _register_shard(param, local, padded, requires_grad), local


def adopt_shard(param: Any, local: torch.Tensor) -> nn.Parameter:
    """Make `local`, of a class with all-gather extensions, the shard of an `FSDPParam`.

    The parameter may have been sharded as a plain tensor. Returns the registered one, a DTensor.
    """
    parameter = _register_shard(param, local, local, requires_grad=False)
    param._init_extensions()
    return parameter


def _register_shard(
    param: Any, local: torch.Tensor, storage: torch.Tensor, requires_grad: bool
) -> nn.Parameter:
    parameter = nn.Parameter(param.to_sharded_dtensor(local), requires_grad=requires_grad)
    param._sharded_param_data = storage.view(-1)
    param.sharded_param = parameter
    param._setattr_on_modules(parameter)
    return parameter


def shard_home(param: Any, device: torch.device) -> tuple[torch.device, bool]:
    """The device of an `FSDPParam`'s shard (the host with offload), and whether its memory is pinned."""
    return torch.device("cpu") if param.offload_to_cpu else device, param.pin_memory


def postponed_hooks(module: nn.Module) -> list[str]:
    """Which parameters of a unit have post-accumulate hooks that a backward now does not call.

    Since torch 2.12.
    """
    return [
        param._param_fqn
        for group in (fsdp_param_groups(module) if isinstance(module, FSDPModule) else ())
        if not (group.reduce_grads and (group.all_reduce_grads or not has_replicas(group)))
        for param in group.fsdp_params
        if getattr(param.sharded_param, "_post_accumulate_grad_hooks", None)
    ]


def has_replicas(group: Any) -> bool:
    """Whether the gradients of a unit's group are averaged over replicas of the shards. Since torch 2.4."""
    return group.mesh_info.replicate_mesh_dim is not None


def before_calls_while_sharded(module: nn.Module, tell: Callable[[nn.Module, Any], None]) -> None:
    """Call `tell(part, args)` before the call of a part of `module` whose parameters its unit has sharded.

    The modules that hold parameters have this hook only while those are sharded, so the calls inside of the
    unit's take no more time and compile as before. Units themselves have none. Since torch 2.4.
    """
    for group in fsdp_param_groups(module) if isinstance(module, FSDPModule) else ():
        places = [param._module_info for param in group.fsdp_params]
        owners = {one for place in places for one in (place.module, *place.shared_modules)}
        inside = owners.intersection(module.modules()).difference(group.modules)
        held = [owner._forward_pre_hooks for owner in inside]
        put = partial(_put, held, tell)
        put(lambda: None)
        for name in ("_to_sharded", "_to_sharded_post_forward") if held else ():
            setattr(group, name, partial(put, getattr(group, name)))
        group._to_unsharded = partial(_take, held, group._to_unsharded) if held else group._to_unsharded
        setattr(group, _PUT, partial(put, bool))
        setattr(group, _TAKE, partial(_take, held, bool))


_HOOK, _PUT, _TAKE = "_composer_dist_while_sharded", "_composer_dist_put", "_composer_dist_take"


def _put(held: list[dict[Any, Any]], hook: Any, change: Callable[[], object]) -> None:
    change()
    for hooks in held:
        hooks[_HOOK] = hook


def _take(held: list[dict[Any, Any]], change: Callable[[], object]) -> None:
    change()
    for hooks in held:
        hooks.pop(_HOOK, None)


def forget_state(module: nn.Module) -> None:
    """Forget that `fully_shard` or `replicate` has taken a module, which now has its own class again.

    Otherwise it could not be taken again. Since torch 2.0.
    """
    _module_state_mapping.pop(module, None)


units_take_transforms = hasattr(_fsdp_common, "_disable_functorch_if_active")
"""Whether transforms of torch.func around a unit are right: since torch 2.13. Before, gradients are lost."""


def finish_lazily(root: FSDPModule) -> None:
    """Run FSDP2's lazy initialization now, so that its checks run before the first forward.

    This also fixes the root, so that a submodule that is called first (such as an encoder by `generate`) does
    not become a root. Integers and complex numbers keep their dtype in the gathered parameters, which older
    versions of torch cast as well.
    """
    state = root._get_fsdp_state()
    if state._is_root is not None:
        return
    state._lazy_init()
    for unit in state._state_ctx.all_states:
        for group in unit._fsdp_param_groups:
            for param in group.fsdp_params:
                if not param.orig_dtype.is_floating_point:
                    param.param_dtype = None


def forget_forward(model: nn.Module) -> None:
    """Reset FSDP2 in `model` after a forward without gradients raised an error. Since torch 2.12.

    Unlike `forget_iteration`, this keeps gradients.
    """
    for unit in (module for module in model.modules() if isinstance(module, FSDPModule)):
        state = unit._get_fsdp_state()
        state._training_state = _fsdp_common.TrainingState.IDLE
        state._state_ctx.iter_forward_root = None
        state._modules_to_run_forward.clear()
        for group in fsdp_param_groups(unit):
            group._training_state = _fsdp_common.TrainingState.IDLE
            group._all_gather_result = None
            group._to_sharded()


def is_initialized(module: FSDPModule) -> bool:
    """Whether FSDP2 has initialized it lazily, so that it can no longer become a part of another root."""
    return module._get_fsdp_state()._is_root is not None


def is_recast(module: FSDPModule) -> bool:
    """Whether parameters of a unit have changed their dtype since FSDP2 was initialized. Since torch 2.6."""
    known = [param for param in fsdp_params(module) if hasattr(param, "orig_dtype")]
    return any(param.sharded_param.dtype != param.orig_dtype for param in known)


def gather_before_backward_of(module: FSDPModule, tensors: Iterable[torch.Tensor]) -> None:
    """Have FSDP2 gather a unit when the gradient of one of `tensors` arrives, as it does for its outputs.

    Since torch 2.4.
    """
    for tensor in tensors:
        tensor.register_hook(module._get_fsdp_state()._pre_backward)


def tensors_with_gradient(output: Any) -> list[torch.Tensor]:
    """The tensors of a unit's output before whose backward FSDP2 itself gathers the unit."""
    return list(collect_grad_tensors(output))
