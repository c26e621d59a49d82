"""The one place where a module's forward is wrapped: in place, in one order, each layer removable.

A module keeps its class. Its own attribute `forward` is the outermost layer, which calls the next one,
down to the forward that was there before. Hooks stay outside of all layers and run once. Deep copies run
layers of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from torch import nn

from composer_dist import _torch
from composer_dist.distributed import prepared
from composer_dist.errors import ParallelismRuntimeError, ParallelismValueError

Forward = Callable[..., Any]

Wrap = Callable[[nn.Module, Forward], Forward]
"""Takes a module and the forward inside, and makes the forward around it. Deep copies copy it too."""


class Layer(IntEnum):
    """What can be around a module's forward, from the innermost to the outermost."""

    PARTS = 1
    """This rank's parts in place of the module's own parameters, in recomputation too."""
    RECOMPUTE = 2
    """Activation checkpointing."""
    COMPILE = 3
    TENSOR_PARALLEL = 4
    """The collectives of a style."""


@dataclass
class Layers:
    """What is around one module's forward."""

    own: Forward | None
    """The forward that the module itself had before, in place of its class's."""
    wraps: dict[Layer, Wrap] = field(default_factory=dict)
    outermost: Forward | None = None
    covered: Layers | None = None
    """Those below a forward that somebody else has put on top; `own` is that one."""


def add(module: nn.Module, layer: Layer, wrap: Wrap) -> None:
    """Put a layer around the forward of `module`, inside of those that come later in `Layer`."""
    layers = _layers(module)
    layers.wraps[layer] = wrap
    _build(module, layers)


def remove(module: nn.Module, layer: Layer) -> None:
    """Take a layer away again. Without layers, the module is as it was before the first.

    Raises:
        ParallelismRuntimeError: the module has no such layer, or it is covered by a forward of somebody else.
    """
    layers = _layers(module)
    if layer not in layers.wraps:
        covered = "the forward that has been set since hides it" if has(module, layer) else "it has none"
        raise ParallelismRuntimeError(
            f"Cannot remove {layer.name.lower()} from the forward of a {type(module).__name__}: {covered}."
        )
    del layers.wraps[layer]
    _build(module, layers)


def has(module: nn.Module, layer: Layer) -> bool:
    """Whether `module` has a layer around its forward."""
    layers: Layers | None = _layers(module)
    while layers is not None:
        if layer in layers.wraps:
            return True
        layers = layers.covered
    return False


def is_checkpointed(module: nn.Module) -> bool:
    """Whether `module` recomputes its forward by our doing, or is a checkpoint wrapper."""
    return has(module, Layer.RECOMPUTE) or isinstance(module, _torch.CheckpointWrapper)


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of `module` run compiled code, by our doing or the user's."""
    return has(module, Layer.COMPILE) or _torch.has_compiled_call(module)


def _layers(module: nn.Module) -> Layers:
    """The layers that are in effect; new ones where there are none, or around a forward of somebody else."""
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
    """From now on those of the methods `names` that `module` has run inside of its call, as forward does.

    FSDP2 gathers a unit's parameters in hooks around its call. A method that is called directly would find
    shards, so it goes through the call: all hooks run around it, and `forward` is itself again as soon as
    they have run.
    """
    for name in names:
        if name != "forward" and has_method(module, name):
            setattr(module, name, _through_call(module, getattr(module, name)))


def has_method(module: nn.Module, name: str) -> bool:
    """Whether the class of `module` has such a method."""
    return callable(getattr(type(module), name, None))


def _through_call(module: nn.Module, method: Forward) -> Forward:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _instead(module, method):
            return module(*args, **kwargs)

    return call


@contextmanager
def _instead(module: nn.Module, method: Forward) -> Iterator[None]:
    """Inside, the next call of `module` runs `method`; later ones, those in `method` too, its forward."""
    before = vars(module).get("forward")

    def restore() -> None:
        vars(module).pop("forward", None)
        if before is not None:
            vars(module)["forward"] = before

    def once(*args: Any, **kwargs: Any) -> Any:
        restore()
        return method(*args, **kwargs)

    vars(module)["forward"] = once
    try:
        yield
    finally:
        restore()


def without_cache(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Take Hugging Face's key-value cache out of a checkpointed block's arguments.

    The recomputation would write to the cache a second time and so compute something else.
    transformers' `GradientCheckpointingLayer` removes it too; `_can_checkpoint_with_cache` is its mark for
    layers that only read.
    """
    caches = [value for value in (*args, *kwargs.values()) if is_cache(value)]
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
    kwargs = {key: None if is_cache(value) else value for key, value in kwargs.items()}
    return tuple(None if is_cache(value) else value for value in args), kwargs


def is_cache(value: object) -> bool:
    """Whether `value` is a key-value cache as Hugging Face's models pass it from block to block."""
    return hasattr(value, "get_seq_length") and not isinstance(value, nn.Module)
