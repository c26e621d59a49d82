"""torch.compile, block by block: which modules, with which options, and how in place.

What is compiled is a module's forward, not its call: hooks, FSDP2's and ours among them, stay outside
and run as they always do, so that they break no graph. Alike blocks share one compilation.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from composer_dist import _torch
from composer_dist.distributed.compiling.plan import Compiled, _CompiledForward


def compile_modules(modules: Mapping[str, nn.Module], compiled: Sequence[Compiled]) -> None:
    """Compile the chosen modules, in place; after activation checkpointing and before sharding.

    Compilation itself happens at the first forward.
    """
    alike: dict[str, dict[str, Any]] = {}
    for one in compiled:
        options = dict(one.options)
        if one.budget is not None:
            # One backend for all alike: with another, Dynamo would compile every block on its own.
            key = repr((options, one.budget))
            options = alike[key] = alike.get(key) or _within(one.budget, options)
        _compile_in_place(modules[one.module], options)


def _within(budget: float, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with a backend that keeps to a memory budget."""
    rest = {key: options[key] for key in ("dynamic", "fullgraph") if key in options}
    inner = (options.get(key) for key in ("mode", "options", "dynamic"))
    return {"backend": _torch.backend_within(budget, options["backend"], *inner), **rest}


def _compile_in_place(module: nn.Module, options: Mapping[str, Any]) -> None:
    forward = module.forward
    module.forward = functools.update_wrapper(_CompiledForward(module, options), forward)
