"""Wraps the forwards of modules in place, in a fixed order, in layers that can be removed.

A module keeps its class. Its attribute `forward` is the outermost layer; each layer calls the next one, down
to the original forward. Hooks run once, outside all layers. Deep copies have their own layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import nn

from composer_dist import _torch
from composer_dist.distributed import prepared
from composer_dist.errors import ParallelismRuntimeError, ParallelismValueError
from composer_dist.structure.families import is_a

Forward = Callable[..., Any]

Wrap = Callable[[nn.Module, Forward], Forward]
"""Takes a module and its inner forward, and returns the outer one; it must support deep copies."""


class Layer(IntEnum):
    """The layers around a module's forward, from the innermost to the outermost."""

    PARTS = 1
    """Replaces the module's parameters by this rank's parts, in recomputation too."""
    RECOMPUTE = 2
    """Activation checkpointing."""
    COMPILE = 3
    TENSOR_PARALLEL = 4
    """The collectives of a style."""
    CALL = 5
    """Runs a direct call of the forward of an FSDP2 unit through the unit's hooks."""
    AUTOCAST = 6
    """The precision of a replicated model."""


@dataclass
class Layers:
    """The layers around one module's forward."""

    own: Forward | None
    """The forward that the module itself had before, instead of its class's."""
    wraps: dict[Layer, Wrap] = field(default_factory=dict)
    outermost: Forward | None = None
    covered: Layers | None = None
    """The layers below a forward that other code has set since; `own` is that forward."""


def add(module: nn.Module, layer: Layer, wrap: Wrap) -> None:
    """Put a layer around the forward of `module`, inside the layers that come later in `Layer`."""
    layers = _layers(module)
    layers.wraps[layer] = wrap
    _build(module, layers)


def remove(module: nn.Module, layer: Layer) -> None:
    """Remove a layer. Without layers, the module is as it was before the first one."""
    layers = _layers(module)
    if layer not in layers.wraps:
        why = "other code has set a forward on top of it" if has(module, layer) else "there is no such layer"
        raise ParallelismRuntimeError(
            f"Cannot remove {layer.name.lower()} from the forward of a {type(module).__name__}: {why}."
        )
    del layers.wraps[layer]
    _build(module, layers)


def call_explained(
    explain: Callable[[RuntimeError, nn.Module], None],
    module: nn.Module,
    call: Forward,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call a forward of `module`; `explain` raises another error than torch's, or adds to it."""
    if torch.compiler.is_compiling():
        return call(*args, **kwargs)
    try:
        return call(*args, **kwargs)
    except RuntimeError as error:
        explain(error, module)
        raise


def has(module: nn.Module, layer: Layer) -> bool:
    """Whether `module` has a layer around its forward."""
    layers: Layers | None = _layers(module)
    while layers is not None:
        if layer in layers.wraps:
            return True
        layers = layers.covered
    return False


def is_checkpointed(module: nn.Module) -> bool:
    """Whether this library recomputes the forward of `module`, or it is a checkpoint wrapper."""
    return has(module, Layer.RECOMPUTE) or isinstance(module, _torch.CheckpointWrapper)


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of `module` run code that this library or the user has compiled."""
    return has(module, Layer.COMPILE) or _torch.has_compiled_call(module)


def _layers(module: nn.Module) -> Layers:
    """The layers in effect; new ones if there are none, or if other code has set a forward on top."""
    known, now = prepared.of(module), vars(module).get("forward")
    layers: Layers | None = None if known is None else known.forward
    if now is None or layers is None:
        return Layers(now)
    return layers if now is layers.outermost else Layers(now, covered=layers)


def _build(module: nn.Module, layers: Layers) -> None:
    vars(module).pop("forward", None)
    if layers.own is not None:
        vars(module)["forward"] = layers.own
    for _, wrap in sorted(layers.wraps.items()):
        vars(module)["forward"] = wrap(module, module.forward)
    layers.outermost = vars(module).get("forward")
    prepared.record(module).forward = layers if layers.wraps else layers.covered
    prepared.tidy(module)


def call_through(module: nn.Module, names: Sequence[str]) -> None:
    """Run those of the methods `names` that `module` has through its call, like forward.

    FSDP2 gathers a unit's parameters in hooks around its call, so a method that is called directly would find
    shards. In such a call, `method` replaces the forward until the hooks before it have run.
    """
    for name in names:
        if name != "forward" and callable(getattr(type(module), name, None)):
            setattr(module, name, _through_call(module, getattr(module, name)))


def _through_call(module: nn.Module, method: Forward) -> Forward:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = vars(module).get("forward")

        def once(*args: Any, **kwargs: Any) -> Any:
            _put_back(module, before)  # `method` may call the module itself
            return method(*args, **kwargs)

        with instead(module, once):
            return module(*args, **kwargs)

    return call


@contextmanager
def instead(module: nn.Module, forward: Forward) -> Iterator[None]:
    """Inside, calls of `module` run `forward` in place of its own, with all layers; hooks run around it."""
    before = vars(module).get("forward")
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        _put_back(module, before)


def _put_back(module: nn.Module, forward: Forward | None) -> None:
    vars(module).pop("forward", None)
    if forward is not None:
        vars(module)["forward"] = forward


def without_cache(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Remove the key-value cache from the arguments of a checkpointed block of transformers.

    transformers removes it too when it checkpoints the block, except for layers with
    `_can_checkpoint_with_cache`, which only read it: a cache keeps the memory that checkpointing saves.
    """
    if not is_a(block, "GradientCheckpointingLayer"):
        return args, kwargs
    caches = [value for value in (*args, *kwargs.values()) if is_cache(value)]
    if kwargs.get("use_cache") is True:
        kwargs = {**kwargs, "use_cache": False}
    if not caches or getattr(block, "_can_checkpoint_with_cache", False):
        return args, kwargs
    indices = (getattr(module, "layer_idx", None) for module in block.modules())
    layer = next((index for index in indices if isinstance(index, int)), 0)
    if any(cache.get_seq_length(layer) > 0 for cache in caches):
        raise ParallelismValueError(
            f"A checkpointed {type(block).__name__} got a key-value cache with earlier tokens, which "
            "recomputation cannot restore. Call the model without past_key_values, or under no_grad, or "
            "exclude the block from activation checkpointing."
        )
    kwargs = {key: None if is_cache(value) else value for key, value in kwargs.items()}
    return tuple(None if is_cache(value) else value for value in args), kwargs


def is_cache(value: object) -> bool:
    """Whether `value` is a key-value cache of Hugging Face."""
    return hasattr(value, "get_seq_length") and not isinstance(value, nn.Module)
