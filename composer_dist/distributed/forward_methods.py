"""Methods other than `forward` that gather a unit's parameters as `forward` does.

A unit gathers in hooks around its call. A method that is called by itself would find shards, so it is
sent through the call: all hooks run around it, FSDP2's and this library's, and `forward` means itself
again as soon as they have run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from composer_dist.distributed.aliases import Structure
from composer_dist.distributed.from_dict import near_miss
from composer_dist.errors import ParallelismValueError


def check_forward_methods(names: Sequence[str], structure: Structure, units: Iterable[str]) -> None:
    """Refuse names that are a method of no unit.

    Raises:
        ParallelismValueError: there are some; says which other modules have such a method.
    """
    modules = [structure.modules[unit] for unit in units]
    faults = []
    for name in names:
        if not any(_has(module, name) for module in modules):
            known = {key for module in modules for key in dir(type(module)) if key not in dir(nn.Module)}
            others = [other for other, module in structure.modules.items() if _has(module, name)]
            remedy = near_miss(name, known)
            if others:
                home = others[0] or "The root"
                remedy = f" {home} has it; make it a unit with Rule({others[0]!r}, shard=True)."
            faults.append(f"forward_methods: no unit has a method {name!r}.{remedy}")
    if faults:
        raise ParallelismValueError("\n".join(faults))


def gather_in_methods(module: nn.Module, names: Sequence[str]) -> None:
    """From now on those of the methods `names` that `module` has run as its forward does."""
    for name in names:
        if name != "forward" and _has(module, name):
            setattr(module, name, _as_forward(module, getattr(module, name)))


def _has(module: nn.Module, name: str) -> bool:
    return callable(getattr(type(module), name, None))


def _as_forward(module: nn.Module, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        own = vars(module).get("forward")  # somebody else may have put one in front of the class's

        def restore() -> None:
            vars(module).pop("forward", None)
            if own is not None:
                vars(module)["forward"] = own

        def redirected(*args: Any, **kwargs: Any) -> Any:
            restore()
            return method(*args, **kwargs)

        vars(module)["forward"] = redirected
        try:
            return module(*args, **kwargs)
        finally:
            restore()

    return call
