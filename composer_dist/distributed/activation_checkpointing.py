"""Activation checkpointing: save less in forward, recompute it in backward.

Three modes. "composable" recomputes in place and renames nothing; "wrapped" puts a wrapper module
around each block, as Composer and Lightning do; "offload" recomputes nothing but keeps what
autograd saves in host memory. `offload=True` among the options of the first two does both: of each
block only the inputs are saved, and those on the host.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from composer_dist import _torch
from composer_dist.distributed.config import ActivationCheckpointing, near_miss
from composer_dist.distributed.policies import has_forward, inherited
from composer_dist.errors import (
    ParallelismRuntimeError,
    ParallelismTypeError,
    ParallelismValueError,
)

Mode = Literal["composable", "wrapped", "offload"]
CheckFn = Callable[[nn.Module], bool]

_CHECKPOINT = ("context_fn", "debug", "determinism_check", "early_stop", "preserve_rng_state")
_OPTIONS: Mapping[Mode, tuple[str, ...]] = {
    "composable": (*_CHECKPOINT, "offload", "pin_memory"),
    "wrapped": (*_CHECKPOINT, "checkpoint_impl", "offload", "pin_memory"),
    "offload": ("pin_memory",),
}


def apply_ac(
    model: nn.Module,
    activation_checkpointing: bool,
    activation_cpu_offload: bool,
    check_fn: CheckFn | None = None,
    *,
    mode: Literal["composable", "wrapped"] = "composable",
) -> None:
    """Checkpoint or offload the activations of chosen modules, in place; Composer's signature.

    Apply it before sharding. The modules are those of `checkpointed_modules`; where there are none
    a warning says so. Composer always wraps, which is `mode="wrapped"` here.

    Args:
        model: any module; itself never checkpointed.
        activation_checkpointing: recompute the modules' activations in backward.
        activation_cpu_offload: keep what is saved in host memory.
        check_fn: decides about each module, in place of the attributes.
        mode: how to checkpoint.

    Raises:
        ParallelismValueError: `check_fn` is given, but neither of the two is asked for.
    """
    chosen = ac_mode(ac_from_flags(activation_checkpointing, activation_cpu_offload))
    if chosen is None:
        if check_fn is not None:
            raise ParallelismValueError(
                "activation_checkpointing_check_fn has no effect: neither activation_checkpointing "
                "nor activation_cpu_offload is on. Switch one on, or leave the function out."
            )
        return
    names = checkpointed_modules(model, check_fn)
    if not names:
        warnings.warn(
            "No module is marked for activation checkpointing: give a check_fn, or set "
            "_activation_checkpointing or activation_checkpointing_fn on the model.",
            UserWarning,
            stacklevel=2,
        )
    kind, options = chosen
    checkpoint_modules(model, names, mode if kind == "composable" else kind, options)


def ac_from_flags(checkpointing: bool, offload: bool) -> ActivationCheckpointing:
    """Composer's two flags as one value of `ParallelismConfig.activation_checkpointing`."""
    if checkpointing:
        return ("composable", {"offload": True} if offload else {})
    return "offload" if offload else None


def ac_mode(value: ActivationCheckpointing, *, strict: bool = True) -> tuple[Mode, dict[str, Any]] | None:
    """What a user wrote for activation checkpointing, as a mode and its options.

    Args:
        value: None or False for none, True for "composable", a mode, or a pair of a mode and
            options (a mapping or None).
        strict: False takes "composable" with a warning where there is no such mode.

    Raises:
        ParallelismValueError: there is no such mode, or it has no such option.
        ParallelismTypeError: the value has none of these forms.
    """
    if value is None or value is False:
        return None
    if value is True:
        return "composable", {}
    name, options = value if isinstance(value, (tuple, list)) and len(value) == 2 else (value, None)
    if not isinstance(name, str) or not (options is None or isinstance(options, Mapping)):
        raise ParallelismTypeError(
            "activation_checkpointing is None, a bool, a mode, or a pair of a mode and its "
            f"options, not {value!r}."
        )
    if name not in _OPTIONS:
        message = (
            f"There is no activation checkpointing mode {name!r}; the modes are "
            f"{', '.join(map(repr, _OPTIONS))}.{near_miss(name, list(_OPTIONS))}"
        )
        if strict:
            raise ParallelismValueError(message)
        warnings.warn(f"{message} Taking 'composable'.", UserWarning, stacklevel=2)
        return "composable", {}
    mode = cast(Mode, name)
    unknown = [str(key) for key in options or () if key not in _OPTIONS[mode]]
    if unknown:
        raise ParallelismValueError(
            f"Activation checkpointing mode {mode!r} has no option "
            f"{', '.join(map(repr, unknown))}; it has {', '.join(_OPTIONS[mode])}."
        )
    return mode, dict(options or {})


def checkpointed_modules(model: nn.Module, check_fn: CheckFn | None = None) -> list[str]:
    """The names of the modules to checkpoint, in the order of the model, never the root.

    `check_fn` decides where it is given. Otherwise a module's own `_activation_checkpointing` does,
    and where it has none, the `activation_checkpointing_fn` of itself or its nearest ancestor. A
    container without a forward of its own (a ModuleList) stands for its children.
    """
    modules = dict(model.named_modules())
    chosen: list[str] = []
    through: set[str] = set()
    for name, module in modules.items():
        asked = name in through or _wants_checkpoint(name, module, modules, check_fn)
        if name and asked and has_forward(module):
            chosen.append(name)
        elif name and asked:
            through.update(f"{name}.{key}" for key, _ in module.named_children())
    return chosen


def _wants_checkpoint(
    name: str, module: nn.Module, modules: Mapping[str, nn.Module], check_fn: CheckFn | None
) -> bool:
    if check_fn is not None:
        return bool(check_fn(module))
    own = getattr(module, "_activation_checkpointing", None)
    if own is not None:
        return bool(own)
    function = inherited(name, modules, "activation_checkpointing_fn")
    return function is not None and bool(function(module))


def checkpoint_modules(
    model: nn.Module, names: Sequence[str], mode: Mode, options: Mapping[str, Any]
) -> None:
    """Checkpoint or offload the named modules, before anything is sharded.

    Args:
        model: the root; changed in place. Only "wrapped" replaces modules in it.
        names: as `named_modules` has them.
        mode: as from `ac_mode`.
        options: as from `ac_mode`.

    Raises:
        ParallelismValueError: a name does not exist, is checkpointed already, or is the root in
            mode "wrapped". The model is then untouched.
        ParallelismRuntimeError: `pin_memory=True` without an accelerator.
    """
    modules = dict(model.named_modules())
    _check_names(modules, names, mode)
    options = dict(options)
    offload = options.pop("offload", mode == "offload")
    pin_memory = _pin_memory(options.pop("pin_memory", None))
    # Innermost first: wrapping a module changes the names of those inside it.
    for name in sorted(set(names), key=lambda name: (name.count("."), name), reverse=True):
        module = modules[name]
        if mode == "composable":
            _recompute_in_place(module, options)
        elif mode == "wrapped":
            wrapper = _torch.checkpoint_wrapper(module, checkpoint_fn=_Recompute(options))
            _replace(model, module, wrapper)
            module = wrapper
        if offload:
            _HostSaved(module, pin_memory)


def _check_names(modules: Mapping[str, nn.Module], names: Sequence[str], mode: Mode) -> None:
    faults = [f"there is no module {name!r}" for name in names if name not in modules]
    if mode == "wrapped" and "" in names:
        faults.append("the root cannot be wrapped, for nothing holds it (use 'composable')")
    for name in names:
        module = modules.get(name)
        if mode != "offload" and module is not None and is_checkpointed(module):
            faults.append(f"{name!r} is checkpointed already")
    if faults:
        raise ParallelismValueError(f"Cannot checkpoint activations: {'; '.join(faults)}.")


def _replace(model: nn.Module, module: nn.Module, wrapper: nn.Module) -> None:
    """Puts `wrapper` wherever `module` stands, so that a module under two names stays one."""
    for parent in list(model.modules()):
        for key, child in list(parent._modules.items()):
            if child is module and parent is not wrapper:
                setattr(parent, key, wrapper)


def is_checkpointed(module: nn.Module) -> bool:
    """Whether `module` recomputes its forward by our doing, or is a checkpoint wrapper."""
    forward = vars(module).get("forward")
    composable = isinstance(forward, functools.partial) and isinstance(forward.func, _Recompute)
    return composable or isinstance(module, _torch.CheckpointWrapper)


def _recompute_in_place(module: nn.Module, options: Mapping[str, Any]) -> None:
    """Puts a recomputed forward on the module itself.

    Not the module's call but its forward, so that hooks stay outside and run once: torch's
    composable checkpoint repeats those that change the inputs, on inputs that they have changed
    already, and cannot run two backwards over one forward (torch 2.13).
    """
    forward = module.forward
    # A partial, not a closure: a deep copy of the module then runs its own forward. The signature
    # is kept because Hugging Face code inspects it.
    recomputed = functools.partial(_Recompute(options, forward), module)
    module.forward = functools.update_wrapper(recomputed, forward)


class _Recompute:
    """Calls a block, or a function in its place, under torch's checkpoint."""

    def __init__(self, options: Mapping[str, Any], function: Callable[..., Any] | None = None) -> None:
        self._function = function
        self._options = dict(options)
        implementation = self._options.pop("checkpoint_impl", None)
        self._options["use_reentrant"] = getattr(implementation, "name", "") == "REENTRANT"

    def __call__(self, block: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            args, kwargs = _without_cache(block, args, kwargs)
        function = functools.partial(self._function or block, **kwargs)
        return checkpoint(function, *args, **self._options)


def _without_cache(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Takes Hugging Face's key-value cache out of a block's arguments.

    The recomputation would write to the cache a second time and so compute something else.
    transformers' `GradientCheckpointingLayer` takes it out likewise; `_can_checkpoint_with_cache`
    is its mark for layers that only read.
    """
    caches = [value for value in (*args, *kwargs.values()) if _is_cache(value)]
    if kwargs.get("use_cache") is True:
        kwargs = {**kwargs, "use_cache": False}
    if not caches or getattr(block, "_can_checkpoint_with_cache", False):
        return args, kwargs
    indices = (getattr(module, "layer_idx", None) for module in block.modules())
    layer = next((index for index in indices if isinstance(index, int)), 0)
    if any(cache.get_seq_length(layer) > 0 for cache in caches):
        raise ParallelismValueError(
            f"A checkpointed {type(block).__name__} got a key-value cache that holds earlier "
            "tokens, which recomputation cannot repeat. Call the model without past_key_values, or "
            "under no_grad, or leave the block out of activation checkpointing."
        )
    kwargs = {key: None if _is_cache(value) else value for key, value in kwargs.items()}
    return tuple(None if _is_cache(value) else value for value in args), kwargs


def _is_cache(value: object) -> bool:
    return hasattr(value, "get_seq_length") and not isinstance(value, nn.Module)


def _pin_memory(wanted: bool | None) -> bool:
    available = torch.accelerator.is_available()
    if wanted and not available:
        raise ParallelismRuntimeError(
            "pin_memory=True needs an accelerator, and this machine has none; leave it out."
        )
    return available if wanted is None else wanted


class _HostSaved:
    """Keeps what autograd saves during a module's forward in host memory.

    The region opens and closes by hooks, outside of the recomputation's and inside FSDP2's, which
    `fully_shard` puts around it later.
    """

    def __init__(self, module: nn.Module, pin_memory: bool) -> None:
        self._pin_memory = pin_memory
        self._open: list[contextlib.AbstractContextManager[Any]] = []
        module.register_forward_pre_hook(self._enter, prepend=True)
        module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: nn.Module, args: Any) -> None:
        # Parameters are no activations, and FSDP2 frees and gathers them itself.
        local = (p for p in module.parameters() if not isinstance(p, DTensor))
        kept = {parameter.untyped_storage().data_ptr() for parameter in local}
        region = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: pack(tensor, kept, self._pin_memory), unpack
        )
        region.__enter__()
        self._open.append(region)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._open:  # empty where an earlier hook failed before `_enter`
            self._open.pop().__exit__(None, None, None)


Packed = tuple[torch.Tensor, torch.device | None, int]


def pack(tensor: torch.Tensor, kept: set[int], pin_memory: bool) -> Packed:
    """A saved tensor on the host, the device it came from (None if not copied) and its version."""
    host = tensor.device.type == "cpu" or tensor.layout is not torch.strided
    if host or isinstance(tensor, DTensor) or tensor.untyped_storage().data_ptr() in kept:
        return tensor, None, tensor._version
    copy = torch.empty_like(tensor, device="cpu", pin_memory=pin_memory)
    copy.copy_(tensor, non_blocking=pin_memory)
    return copy, tensor.device, 0


def unpack(packed: Packed) -> torch.Tensor:
    """The saved tensor, back on its device.

    Raises:
        ParallelismRuntimeError: it was not copied and has changed since, which autograd itself
            would notice but for the hooks.
    """
    tensor, device, version = packed
    if device is not None:
        return tensor.to(device, non_blocking=tensor.is_pinned())
    if tensor._version != version:
        raise ParallelismRuntimeError(
            f"A tensor of shape {tuple(tensor.shape)} that backward needs was changed in place "
            "after forward saved it."
        )
    return tensor
