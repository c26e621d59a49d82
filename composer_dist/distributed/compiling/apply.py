"""torch.compile, block by block: compiled in place.

What is compiled is a module's forward, not its call: hooks, FSDP2's and ours among them, stay outside
and run as they always do, so that they break no graph. Alike blocks share one compilation.
"""

import functools
import warnings
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


def apply(structure: Structure, plan: CompilePlan | None) -> None:
    """Compile the planned modules, in place; after activation checkpointing and before sharding.

    Compilation itself happens at the first forward.
    """
    alike: dict[str, dict[str, Any]] = {}
    for one in plan.modules if plan else ():
        options = dict(one.options)
        if one.budget is not None:
            # One backend for all alike: with another, Dynamo would compile every block on its own.
            key = repr((options, one.budget))
            options = alike[key] = alike.get(key) or _within(one.budget, options)
        forwards.add(
            structure.modules[one.module], Layer.COMPILE, functools.partial(_CompiledForward, options)
        )


def _within(budget: float, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with a backend that keeps to a memory budget."""
    rest = {key: options[key] for key in ("dynamic", "fullgraph") if key in options}
    inner = (options.get(key) for key in ("mode", "options", "dynamic"))
    return {"backend": _torch.backend_within(budget, options["backend"], *inner), **rest}


class _CompiledForward:
    """A module's forward, compiled when first called.

    Deep copies and pickles leave the compiled code behind, and compile their own.
    """

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
            if self._recomputed:  # here already: inside, every block would be compiled for its own index
                args, kwargs = without_cache(self._module, args, kwargs)
            else:
                warnings.warn(_CACHE, UserWarning, stacklevel=2)
        with _torch.one_side_effect() if self._recomputed else nullcontext():
            return self._compiled(*args, **kwargs)


_CACHE = (
    "A compiled block was called for training with a key-value cache, so that every block is compiled "
    "on its own, and after the eighth none. Call the model with use_cache=False."
)
