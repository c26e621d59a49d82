"""torch.compile, block by block and in place.

A module's forward is compiled, not its call, so that hooks (including FSDP2's and ours) run outside and do
not break graphs. Identical blocks share one compilation.
"""

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from composer_dist import _torch
from composer_dist.distributed import forwards
from composer_dist.distributed.compiling.plan import CompilePlan
from composer_dist.distributed.forwards import Layer, is_cache, is_checkpointed, without_cache
from composer_dist.structure.structure import Structure
from composer_dist.users_code import warn


def apply(structure: Structure, plan: CompilePlan | None) -> None:
    """Make the planned modules compile at their first forward; after checkpointing, before sharding."""
    alike: dict[str, dict[str, Any]] = {}
    if plan:
        _torch.explain_in_backward(_second_order)
    for one in plan.modules if plan else ():
        options = dict(one.options)
        if one.budget is not None:
            # Identical blocks share one backend object; otherwise Dynamo would compile each separately.
            key = repr((options, one.budget))
            options = alike[key] = alike.get(key) or _within(one.budget, options)
        forwards.add(
            structure.modules[one.module], Layer.COMPILE, functools.partial(_CompiledForward, options)
        )


def _second_order(error: RuntimeError) -> str | None:
    if not any(words in str(error) for words in ("non-empty donated buffers", "support double backward")):
        return None
    return (
        "A backward with create_graph=True or retain_graph=True has reached a compiled module. torch.compile "
        "supports no gradients of gradients: leave the module uncompiled (compile=False). For "
        "retain_graph=True alone, set torch._functorch.config.donated_buffer = False."
    )


def _within(budget: float, options: Mapping[str, Any]) -> dict[str, Any]:
    rest = {key: options[key] for key in ("dynamic", "fullgraph") if key in options}
    inner = (options.get(key) for key in ("mode", "options", "dynamic"))
    return {"backend": _torch.backend_within(budget, options["backend"], *inner), **rest}


class _CompiledForward:
    """A module's forward, compiled when it is first called; deep copies and pickles compile again."""

    def __init__(self, options: Mapping[str, Any], module: nn.Module, forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward)
        self._module, self._forward, self._options = module, forward, dict(options)
        self._recomputed = is_checkpointed(module)

    @functools.cached_property
    def _compiled(self) -> Any:
        return torch.compile(self._forward, **self._options)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_compiled"}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and any(is_cache(value) for value in (*args, *kwargs.values())):
            if self._recomputed:  # inside the graph, every block would be compiled for its own index
                args, kwargs = without_cache(_torch.unwrapped(self._module), args, kwargs)
            else:
                warn(_CACHE)
        with _torch.one_side_effect() if self._recomputed else nullcontext():
            return self._compiled(*args, **kwargs)


_CACHE = (
    "A compiled block was called for training with a key-value cache, so every block is compiled "
    "separately, and none after the eighth. Call the model with use_cache=False."
)
