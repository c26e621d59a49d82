"""Selects modules for the user's rules by name, type or function."""

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from composer_dist.config.rule import Match
from composer_dist.structure.blocks import has_forward
from composer_dist.structure.structure import Structure
from composer_dist.wording import near_miss


def select(match: Match, modules: Mapping[str, nn.Module]) -> list[str]:
    """The names in `modules` that `match` selects, in the order of the model (see `Rule.match`)."""
    match match:
        case list() | tuple():
            chosen = {name for part in match for name in select(part, modules)}
            return [name for name in modules if name in chosen]
        case str() if match.startswith("re:"):
            return select(re.compile(match[3:]), modules)
        case str() if match.startswith("type:"):
            return [name for name, module in modules.items() if match[5:] in _type_names(module)]
        case str():
            return [match] if match in modules else []
        case re.Pattern():
            return [name for name in modules if match.fullmatch(name)]
        case type():
            return [name for name, module in modules.items() if isinstance(module, match)]
        case _:
            return [name for name, module in modules.items() if match(name, module)]


def spell(match: Match) -> str:
    """A rule's `match` as its author would write it; the same on every rank."""
    if isinstance(match, (list, tuple)):
        return "[" + ", ".join(spell(part) for part in match) + "]"
    if isinstance(match, re.Pattern):
        return repr(f"re:{match.pattern}")
    return repr(match) if isinstance(match, str) else getattr(match, "__qualname__", type(match).__name__)


def parts_of(match: Match) -> list[Match]:
    """`match` as a list, with nested lists flattened."""
    if isinstance(match, (list, tuple)):
        return [inner for part in match for inner in parts_of(part)]
    return [match]


def inherited(modules: Mapping[str, nn.Module], attribute: str) -> dict[str, Any]:
    """`attribute` of each module or of its nearest ancestor that has it, else None; parents come first."""
    found: dict[str, Any] = {}
    for name, module in modules.items():
        own = getattr(module, attribute, None)
        found[name] = own if own is not None or not name else found[name.rpartition(".")[0]]
    return found


def _type_names(module: nn.Module) -> set[str]:
    kinds = type(module).__mro__
    return {name for k in kinds for name in (k.__qualname__, f"{k.__module__}.{k.__qualname__}")}


def neighbor(match: Match, modules: Mapping[str, nn.Module]) -> str:
    """A suggestion for a `match` that selects nothing, or an empty string."""
    if not isinstance(match, str):
        return ""
    if match.startswith("type:"):
        return near_miss(match, {f"type:{type(module).__qualname__}" for module in modules.values()})
    return near_miss(match.removeprefix("re:"), list(modules))


def children_of(name: str, structure: Structure) -> list[str]:
    """The names of a bare container's children; bare containers among them give their own children."""
    found: list[str] = []
    for key, child in structure.modules[name]._modules.items():
        path = f"{name}.{key}" if name else key
        if child is not None and path in structure.modules:
            found += [path] if has_forward(child) else children_of(path, structure)
    return found


def container_text(name: str, module: nn.Module, containers: str) -> str:
    """The warning that a container cannot be a unit."""
    skipped = "it is skipped" if containers == "skip" or not module._modules else "its children are used"
    return f"{name or 'The root'} is a {type(module).__name__}, which has no forward of its own; {skipped}."
