"""FSDP2's own hooks of a unit, with the same effects in less time, or held back; and its collectives."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial, wraps
from itertools import chain
from types import MethodType
from typing import Any
from zlib import crc32

import torch
from torch import nn
from torch.distributed import ReduceOp
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._common_utils import collect_grad_tensors, replace_grad_tensors
from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.utils.weak import WeakTensorKeyDictionary

from composer_dist._torch.backward import is_transforming
from composer_dist._torch.operations import eager
from composer_dist._torch.sharding import fsdp_param_groups, has_replicas


def shorten_hooks(module: FSDPModule) -> None:
    """Have a unit take less time around its calls and its backward.

    FSDP2 wraps its hooks for torch.compile in each of their calls; here they are wrapped once. And it passes
    the inputs through a function of autograd whose arguments torch inspects. Since torch 2.13.
    """
    state: Any = module._get_fsdp_state()
    _hook_leaves_once(state)
    groups = fsdp_param_groups(module)
    for group in groups:
        group._register_post_backward_hook = _Inputs(group, group._register_post_backward_hook)
    if not hasattr(_fsdp_common, "_dynamo_disable"):
        return
    for owner in groups:
        for name in ("pre_backward", "post_backward"):
            setattr(owner, name, _wrapped_once(getattr(owner, name)))
    state._pre_backward = _wrapped_once(state._pre_backward)
    if len(state._modules) == 1:
        for hooks, handle in (
            (state._modules[0]._forward_pre_hooks, state._pre_forward_hook_handle),
            (state._modules[0]._forward_hooks, state._post_forward_hook_handle),
        ):
            hooks[handle.id] = _wrapped_once(hooks[handle.id])


class _Watched:
    """A collective for FSDP2's `set_custom_all_gather` or `set_custom_reduce_scatter`; see below."""

    params: Sequence[Any] = ()
    """The `FSDPParam`s whose gradients it reduces next."""

    def __init__(self, collective: Any, tell: Callable[[Any, Any, Any], torch.Tensor | None]) -> None:
        self._collective, self._tell = collective, tell
        self.allocate = collective.allocate

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any = None, **kwargs: Any
    ) -> Any:
        rows = self._tell(input_tensor, group, op)
        if rows is None:
            kwargs |= {} if op is None else {"op": op}
            return self._collective(output_tensor, input_tensor, group, **kwargs)
        if op is None:
            output_tensor.view(rows.shape).copy_(rows)
        else:
            torch.sum(rows.view(len(rows), len(rows), -1)[:, group.rank()], 0, out=output_tensor)
            if op == ReduceOp.AVG:
                output_tensor.div_(len(rows))
        return None  # no work: it is done


@cache
def _note_params() -> None:
    """Have FSDP2 tell a watched collective whose gradients it is about to reduce."""
    place: Any = _fsdp_param_group
    reduce = place.foreach_reduce

    @wraps(reduce)
    def noting(params: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        for one in (*args, *kwargs.values()):
            if isinstance(one, _Watched):
                one.params = params
        return reduce(params, *args, **kwargs)

    place.foreach_reduce = noting


def before_collectives(
    module: nn.Module, tell: Callable[[int, torch.Tensor, list[Any], bool], torch.Tensor | None]
) -> None:
    """Call `tell(reduces, sent, groups, plain)` before each collective of the FSDP2 unit `module`.

    `reduces` is 0 if it gathers, 1 if it reduces all gradients, and else a number for those that there are;
    `sent` is what this rank sends; `groups` are the groups of the collective, followed by the replicas' if
    gradients are all-reduced next; `plain` says that it gathers, sums or averages. What `tell` returns, all
    that the first group's ranks send, `(ranks, numel)`, stands for the collective; if it is None, the current
    one runs. They are not public. Since torch 2.9.
    """
    _note_params()
    for group in fsdp_param_groups(module) if isinstance(module, FSDPModule) else ():

        def gathers(sent: torch.Tensor, shards: Any, op: Any) -> torch.Tensor | None:
            return tell(0, sent, [shards], True)

        def reduces(sent: torch.Tensor, shards: Any, op: Any, group: Any = group) -> torch.Tensor | None:
            replicas = group.all_reduce_grads and has_replicas(group)
            groups = [shards, group._all_reduce_process_group] if replicas else [shards]
            there = {id(one) for one in group._reduce_scatter_comm.params}
            absent = [n for n, one in enumerate(group.fsdp_params) if id(one) not in there]
            which = 1 + crc32(repr(absent).encode()) if absent else 1
            return tell(which, sent, groups, op in (ReduceOp.SUM, ReduceOp.AVG))

        group._all_gather_comm = _Watched(group._all_gather_comm, gathers)
        group._reduce_scatter_comm = _Watched(group._reduce_scatter_comm, reduces)


def fill_gradients(
    module: nn.Module, shards: Sequence[torch.Tensor], anywhere: Callable[[Sequence[bool]], Sequence[bool]]
) -> None:
    """Before the unit of `module` is reduced, give gradients of zero to shards that have one elsewhere only.

    Args:
        anywhere: given which of the shards have a gradient on this rank, says which have one on any; a
            collective. It is not called where a backward reduces nothing. Since torch 2.12.
    """
    for group in fsdp_param_groups(module) if isinstance(module, FSDPModule) else ():
        by_shard = {id(param.sharded_param): param for param in group.fsdp_params}
        params = [by_shard[id(shard)] for shard in shards if id(shard) in by_shard]
        if params:
            group.post_backward = partial(_after_filling, group, params, anywhere, group.post_backward)


def _after_filling(
    group: Any, params: Sequence[Any], anywhere: Callable[..., Sequence[bool]], reduce: Callable[[], None]
) -> None:
    params = [param for param in params if hasattr(param, "_unsharded_param")]  # after its first forward
    if group.reduce_grads and params:
        here = [
            param.unsharded_accumulated_grad is not None or param._unsharded_param.grad is not None
            for param in params
        ]
        for param, is_here, is_anywhere in zip(params, here, anywhere(here), strict=True):
            if is_anywhere and not is_here:
                param._unsharded_param.grad = torch.zeros_like(param._unsharded_param)
    reduce()


@contextmanager
def shards_kept(model: nn.Module) -> Iterator[None]:
    """Inside, FSDP2 does not take what is loaded into modules, or converted in them, for its own shards.

    It does so after `load_state_dict` and `to`; each module that holds a parameter has a hook for it. Since
    torch 2.6.
    """
    hooks = chain.from_iterable(one._load_state_dict_post_hooks.values() for one in model.modules())
    cells = chain.from_iterable(getattr(hook, "__closure__", None) or () for hook in hooks)
    params = [cell.cell_contents for cell in cells if isinstance(cell.cell_contents, FSDPParam)]
    for param in params:
        vars(param)["reset_sharded_param"] = lambda: None
    try:
        yield
    finally:
        for param in params:
            vars(param).pop("reset_sharded_param", None)  # one may have several hooks


def _hook_leaves_once(state: Any) -> None:
    """Have FSDP2 not hook a parameter once more in each forward that returns it."""
    register, hooked = state._register_pre_backward_hook, WeakTensorKeyDictionary()

    def register_once(output: Any) -> Any:
        if not torch.is_grad_enabled() or is_transforming():
            return register(output)
        new = [tensor for tensor in collect_grad_tensors(output) if tensor not in hooked]
        register(new)
        hooked.update({tensor: None for tensor in new if tensor.is_leaf})
        return output

    state._register_pre_backward_hook = register_once


def _wrapped_once(method: Any) -> Any:
    """A bound method of FSDP2, which is eager, without the wrapper that makes it so in each call."""
    return eager(MethodType(method.__func__.__wrapped__, method.__self__))


class _Inputs:
    """Instead of `FSDPParamGroup._register_post_backward_hook`."""

    def __init__(self, group: Any, original: Any) -> None:
        self._group, self._original = group, original

    def __call__(self, args: Any, kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or is_transforming():
            return self._original(args, kwargs)
        tensors = collect_grad_tensors((args, kwargs))
        if not tensors:
            return args, kwargs
        own = _PostBackward.apply(self._group, *tensors)  # type: ignore[no-untyped-call]
        return replace_grad_tensors((args, kwargs), iter(own))


class _PostBackward(torch.autograd.Function):
    """The identity; its backward reduces a unit's gradients.

    The results share memory with the inputs, but are not views of them: a forward may change them in place.
    """

    @staticmethod
    def forward(ctx: Any, group: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        ctx.group.post_backward()
        return None, *gradients
