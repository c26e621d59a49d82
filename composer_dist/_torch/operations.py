"""Operations of the dispatcher, and torch.compile."""

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

# The mode that intercepts operations, with which initializers are traced. Since torch 1.13.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


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
