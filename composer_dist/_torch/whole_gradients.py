"""The whole gradients that FSDP2 keeps until a backward reduces them."""

from collections.abc import Callable, Set
from functools import partial
from typing import Any
from weakref import KeyedRef

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor

from composer_dist._torch.backward import (
    after_every_backward,
    after_failed_backward,
    current_backward,
    replace_inputs,
)
from composer_dist._torch.sharding import fsdp_param_groups, fsdp_params
from composer_dist.errors import ParallelismRuntimeError

_grad_accumulates = hasattr(FSDPParam, "unsharded_grad_dtype")
"""Whether whole gradients accumulate in `grad` of the gathered parameter, as they do since torch 2.15.

Without a `reduce_dtype` they have the parameter's own dtype then. Before, FSDP2 kept them in a tensor of its
own if there was a `reduce_dtype`, and otherwise in the dtype of the gathered parameter.
"""


def accumulated_nbytes(module: FSDPModule) -> int:
    """Bytes of a unit's whole gradients, in the dtype in which FSDP2 accumulates them. Since torch 2.4."""
    nbytes = 0
    for param in fsdp_params(module):
        if param.sharded_param.requires_grad:
            gathered = None if _grad_accumulates else param.mp_policy.param_dtype
            dtype = param.mp_policy.reduce_dtype or gathered or param.sharded_param.dtype
            nbytes += param._orig_size.numel() * dtype.itemsize
    return nbytes


def unreduced(module: FSDPModule) -> list[tuple[str, nn.Parameter]]:
    """A unit's shards, by name, whose gradients wait for a synchronized backward. Since torch 2.4."""
    return [
        (param._param_fqn, param.sharded_param)
        for group in (fsdp_param_groups(module) if _waiting else ())
        for param in group.fsdp_params
        if _is_unreduced(param, group)
    ]


def any_unreduced() -> bool:
    """Whether there may be gradients that wait for a synchronized backward."""
    return bool(_waiting)


def drop_unreduced(module: FSDPModule, held: Set[int]) -> None:
    """Drop the whole gradients of a unit's parameters, sharded or gathered, with these ids. Since torch 2.4.

    Raises:
        ParallelismRuntimeError: HSDP keeps the unit's in one sum, and some are not held.
    """
    for group in fsdp_param_groups(module):
        _drop_of_group(group, held)


def _drop_of_group(group: Any, held: Set[int]) -> None:
    mine = [
        param
        for param in group.fsdp_params
        if _is_unreduced(param, group) and any(id(one) in held for one in _forms(param))
    ]
    if not mine:
        return
    rest = [p._param_fqn for p in group.fsdp_params if p.sharded_param.requires_grad and p not in mine]
    if rest and group._partial_reduce_output is not None:
        raise ParallelismRuntimeError(
            "zero_grad cannot drop a part of the gradients that are not reduced over the replicas yet: "
            f"those of {', '.join(rest)} are in one sum with them. Call model.zero_grad()."
        )
    for param in mine:
        _drop(param)
    group._partial_reduce_output = None


def drop_with_gradients(module: FSDPModule) -> None:
    """Have `parameter.grad = None` also drop what a unit keeps of that gradient, as `drop_unreduced` does.

    And have code that reads it there raise an error, instead of None: by a property of all DTensors, over
    torch's own. Since torch 2.4.
    """
    from torch._dynamo.decorators import skip  # here, where an optimizer has imported it already

    for group in fsdp_param_groups(module):
        group.post_backward = partial(_post_backward, group, group.post_backward)
        for param in group.fsdp_params:
            setattr(param, _GROUP, group)
            key = id(param.sharded_param)
            _kept[key] = KeyedRef(param, _forget, key)
    replace_inputs(_gathered)
    after_every_backward(_note_late)
    for function in (_get_grad, _set_grad, _record, _is_unreduced, current_backward):
        skip(function)  # Dynamo, in a compiled `step`, would read `.grad` by the property itself
    setattr(DTensor, "grad", property(_get_grad, _set_grad, _grad.__delete__))  # noqa: B010


_grad: Any = torch.Tensor.grad
_read_grad = _grad.__get__
_GROUP = "_composer_dist_group"
"""The attribute of FSDP2's record of a parameter that holds its record of the unit."""
_kept: dict[int, KeyedRef[int, Any]] = {}
"""By the identity of a shard, FSDP2's record of the parameter; every read of a gradient looks here.

As in a `WeakValueDictionary`, whose `get` takes longer.
"""


_waiting: set[int] = set()
"""The identities of FSDP2's records of units that may keep whole gradients; reads of others are quick."""
_passed: list[Any] = []
"""The records of units that backward has passed since none ran."""


def _post_backward(group: Any, reduce: Callable[[], None]) -> None:
    reduce()
    _passed.append(group)
    if group.reduce_grads and group.all_reduce_grads:
        _waiting.discard(id(group))
    else:
        _waiting.add(id(group))


def _note_late(failed: bool) -> None:
    """Look for gradients that came after those of their units were reduced, or before an error."""
    if failed:
        known = (there() for there in list(_kept.values()))
        _passed.extend({getattr(param, _GROUP) for param in known if param is not None})
    while _passed:
        group = _passed.pop()
        if any(_is_unreduced(param, group) for param in group.fsdp_params):
            _waiting.add(id(group))


def _forget(gone: KeyedRef[int, Any]) -> None:
    if _kept.get(gone.key) is gone:
        del _kept[gone.key]


def _record(tensor: torch.Tensor) -> Any:
    """FSDP2's record of a shard, if it is one."""
    there = _kept.get(id(tensor))
    param = None if there is None else there()
    return param if param is not None and param.sharded_param is tensor else None


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    """What represents a shard in the graph, which FSDP2 reduces to the shard's gradient."""
    gathered: torch.Tensor = getattr(_record(tensor), "_unsharded_param", tensor)
    return gathered


def _get_grad(tensor: DTensor) -> Any:
    grad = _read_grad(tensor)
    if not _waiting and (not isinstance(grad, DTensor) or grad._spec is tensor._spec):
        return grad
    if (param := _record(tensor)) is not None:
        other = isinstance(grad, DTensor) and grad._spec is not tensor._spec
        if other and grad.placements != tensor.placements and _is_whole(grad):
            # Of a penalty on a shard: torch cuts nothing with fewer rows than ranks, but FSDP2 adds parts.
            grad = grad.redistribute(placements=tensor.placements)
            _grad.__set__(tensor, grad)
        group = getattr(param, _GROUP)
        if _is_unreduced(param, group) and current_backward() == -1:
            if getattr(group, "_composer_dist_synchronizes", False):
                raise ParallelismRuntimeError(
                    f"The gradient of {param._param_fqn} came after those of its unit were reduced over the "
                    "ranks: a part of the unit's forward ran in another thread, and autograd does not keep "
                    "the order of operations of several threads. Run the forward of a unit in one thread, or "
                    "leave what runs in another whole: Rule(..., shard=False)."
                )
            raise ParallelismRuntimeError(
                f"The gradient of {param._param_fqn} is not reduced over the ranks yet, because the last "
                "backward was inside of no_sync. Read or change .grad after a backward outside of it."
            )
    return grad


def _is_whole(tensor: DTensor) -> bool:
    return all(placement.is_replicate() for placement in tensor.placements)


def _set_grad(tensor: DTensor, value: torch.Tensor | None) -> None:
    _grad.__set__(tensor, value)
    if value is None and _waiting and (param := _record(tensor)) is not None:
        group = getattr(param, _GROUP)
        if _is_unreduced(param, group):
            _drop_of_group(group, {id(tensor)})


def _is_unreduced(param: Any, group: Any) -> bool:
    gathered = getattr(param, "_unsharded_param", None)
    return (
        (gathered is not None and gathered.grad is not None)
        or getattr(param, "unsharded_accumulated_grad", None) is not None
        or group._partial_reduce_output is not None
    )


def _forms(param: Any) -> tuple[Any, ...]:
    return param.sharded_param, getattr(param, "_unsharded_param", None)


def _drop(param: Any) -> None:
    if not _grad_accumulates:
        param.unsharded_accumulated_grad = None
    if hasattr(param, "_unsharded_param"):
        param._unsharded_param.grad = None


def forget_iteration(model: nn.Module) -> None:
    """Reset FSDP2 in `model` after a forward or backward raised an error, so that a forward can start.

    This also drops whole gradients that were to be reduced, which torch's own reset keeps before torch 2.15.
    `reset_iter_state` is public since torch 2.13 and does not exist before.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        if unit._get_fsdp_state()._is_root:
            unit.reset_iter_state()
        for param in fsdp_params(unit):
            _drop(param)


def forget_failed_iterations(model: nn.Module) -> None:
    """Reset FSDP2 in `model` whenever a backward through it raises an error, where torch supports that.

    Without it, the next forward and backward would fail, or `zero_grad`.
    """
    if forgets_iterations:
        after_failed_backward(model, _forget_failed)


def _forget_failed(model: nn.Module) -> None:
    states = [one._get_fsdp_state() for one in model.modules() if isinstance(one, FSDPModule)]
    if any(state._state_ctx.post_backward_final_callback_queued for state in states):
        forget_iteration(model)


forgets_iterations = hasattr(FSDPModule, "reset_iter_state")
"""Whether this version of torch supports `forget_iteration`."""
