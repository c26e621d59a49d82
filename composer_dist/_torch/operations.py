"""Operations of the dispatcher, those that write by masks and indices into shards, and torch.compile."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import nn

# An overload of an operation, all its overloads, and operations on functions. Since torch 1.12.
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch.distributed.tensor import DTensor, Replicate

# The mode that intercepts operations, with which initializers are traced. Since torch 1.13.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


def assert_all(conditions: torch.Tensor, message: str) -> None:
    """Raise a RuntimeError if any is false; on a GPU later, without waiting for it. Since torch 2.1."""
    torch._assert_async(conditions.all(), message)


def attention_on_cpus() -> tuple[Any, Any]:
    """Forward and backward; torch.utils.flop_counter has no formulas for them. Since torch 2.2."""
    aten = torch.ops.aten
    forward = aten._scaled_dot_product_flash_attention_for_cpu
    return forward, aten._scaled_dot_product_flash_attention_for_cpu_backward


def arguments(operation: Any) -> Sequence[Any]:
    """The declared arguments of an operation: name, default value, whether it writes. Since torch 1.12."""
    declared: Sequence[Any] = operation._schema.arguments
    return declared


def is_mutable(operation: OpOverload) -> bool:
    """Whether an operation changes one of its arguments. Since torch 1.12."""
    return bool(operation._schema.is_mutable)


def packet(operation: Any) -> Any:
    """All overloads of an operation; None if it has none. Since torch 1.12."""
    return getattr(operation, "_overloadpacket", None)


def operators() -> dict[str, list[str]]:
    """All operations of the dispatcher, such as "aten.mm", with their overloads. Since torch 1.5."""
    found: dict[str, list[str]] = {}
    for name in torch._C._dispatch_get_all_op_names():
        base, _, overload = name.partition(".")
        found.setdefault(base.replace("::", "."), []).append(overload or "default")
    return found


def is_composite(operator: Any) -> bool:
    """Whether torch decomposes an operation before dispatch modes see it. Since torch 1.12."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return bool(operator.has_kernel_for_dispatch_key(key))


def one_side_effect() -> AbstractContextManager[None]:
    """Inside, a checkpointed forward with side effects on objects can be compiled.

    Tensor parallelism, for example, replaces parameters by their parts and back. The compiled code repeats
    such a change in forward, but not in backward. Since torch 2.10; torchtitan also sets this.
    """
    from torch._dynamo import config

    patch: AbstractContextManager[None] = config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True)
    return patch


def inductor_modes() -> list[str]:
    """The values of torch.compile's `mode`. Since torch 2.0."""
    from torch._inductor import list_mode_options

    return sorted(list_mode_options())


def inductor_options() -> list[str]:
    """The keys of torch.compile's `options`. Since torch 2.0."""
    from torch._inductor import list_options

    return list_options()


def backend_within(
    budget: float, backend: str, mode: str | None, options: dict[str, Any] | None, dynamic: bool | None
) -> Callable[[Any, Any], Any]:
    """A backend for torch.compile that keeps at most a share `budget` of the activations.

    Torch's setting is global, so it is set only while this backend compiles. Since torch 2.4; in torch 2.13,
    `torch.autograd.graph.region_activation_memory_budget` must be traced.
    """
    from torch._functorch import config

    if backend == "inductor":
        compiler: Any = torch._TorchCompileInductorWrapper(mode, options, dynamic)
    else:
        compiler = torch._TorchCompileWrapper(backend, mode, options, dynamic)

    def compile_within_budget(graph: Any, inputs: Any) -> Any:
        with config.patch(activation_memory_budget=budget):
            return compiler(graph, inputs)

    return compile_within_budget


def eager(method: Any) -> Callable[..., Any]:
    """A bound method that is never compiled, as FSDP2's own hooks are, by one wrapper for all objects."""
    return MethodType(_eager(method.__func__), method.__self__)


@cache
def _eager(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compiler.disable(function)  # type: ignore[no-any-return]


def has_compiled_call(module: nn.Module) -> bool:
    """Whether `module.compile()` was called. Since torch 2.2."""
    return getattr(module, "_compiled_call_impl", None) is not None


def forget_step_hooks(optimizer: Any) -> None:
    """Give an optimizer no hooks, such as a copy that shares those of another one."""
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()


def write_part(op: Any, tensor: DTensor, *args: Any, **kwargs: Any) -> None:
    """Write by a mask or by indices into this rank's part of a sharded tensor what the rank has of it.

    Masks, indices and values are the same on all ranks, as without sharding. Except for one value at a mask,
    the operation runs on whole tensors of zeros and of ones, which show what it writes, and where; or on the
    whole tensor, if the result depends on what is there.
    """
    part: Any = tensor._local_tensor
    kind = op.overloadpacket
    depends = kind in _REDUCES or "reduce" in op._overloadname
    if kind in (_aten.index_put_, _aten.put_):
        depends = kwargs.get("accumulate", args[2] if len(args) > 2 else False)
    mask, value = None, None
    if kind is _aten.masked_fill_:
        mask, value = args
    elif kind is _aten.index_put_ and not depends and len(args[0]) == 1 and args[1].numel() == 1:
        mask, value = (args[0][0], args[1].reshape(())) if args[0][0].dtype is torch.bool else (None, None)
    if mask is not None:
        mask = mask.reshape((*mask.shape, *[1] * (tensor.ndim - mask.ndim))) if op in _PREFIXED else mask
        part.masked_fill_(_part_of(mask.expand(tensor.shape), tensor), _whole(value))
        return
    args, kwargs = tuple(map(_whole, args)), {key: _whole(one) for key, one in kwargs.items()}
    if depends:
        part.copy_(_part_of(op(tensor.full_tensor(), *args, **kwargs), tensor))
        return
    low = op(torch.zeros(tensor.shape, dtype=tensor.dtype, device=part.device), *args, **kwargs)
    written = low.isnan().logical_or_(low == op(torch.ones_like(low), *args, **kwargs))
    part.copy_(torch.where(_part_of(written, tensor), _part_of(low, tensor), part))


def fill_diagonal(tensor: DTensor, fill_value: float, wrap: bool = False) -> DTensor:
    """Fill the diagonal by a mask; torch would write through a view of a part."""
    mask = torch.zeros(tensor.shape, dtype=torch.bool, device=tensor._local_tensor.device)
    return tensor.masked_fill_(mask.fill_diagonal_(True, wrap), fill_value)  # type: ignore[return-value]


def _whole(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_whole(one) for one in value]
    return value.full_tensor() if isinstance(value, DTensor) else value


def _part_of(tensor: Any, like: DTensor) -> Any:
    """What a rank has of a tensor that is sharded like another; of a whole one without communication."""
    if not isinstance(tensor, DTensor):
        whole = [Replicate()] * like.device_mesh.ndim
        tensor = DTensor.from_local(tensor.contiguous(), like.device_mesh, whole, run_check=False)
    return tensor.redistribute(placements=like.placements)._local_tensor


_aten = torch.ops.aten
_PREFIXED = (_aten.index_put_.default,)
"""A mask of the first dimensions; in the others, one of the last."""
_REDUCES = frozenset((_aten.index_add_, _aten.scatter_add_, _aten.index_reduce_, _aten.scatter_reduce_))
_BY = "index_put_ index_copy_ index_fill_ put_ scatter_ masked_fill_ masked_scatter_ triu_ tril_"
BY_INDEX = frozenset(
    getattr(packet, overload)
    for packet in [*(getattr(_aten, name) for name in _BY.split()), *_REDUCES]
    for overload in packet.overloads()
    if "out" not in overload
)
