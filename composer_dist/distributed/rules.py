"""Rules: which modules each one selects, and what they say together.

Selecting needs nothing but the names and the modules; what becomes of the selected is for others
(`policies`, `checkpoint_plan`, `tensor_parallel`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from torch import nn

from composer_dist.distributed.aliases import Structure
from composer_dist.distributed.blocks import has_forward
from composer_dist.distributed.config import Match, Rule, near_miss
from composer_dist.errors import ParallelismValueError


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


def merge_rules(
    rules: Sequence[Rule], structure: Structure, containers: str
) -> tuple[dict[str, dict[str, tuple[Any, str]]], list[str]]:
    """Module name to the fields that the rules set there, later rules winning field by field.

    A ModuleList or ModuleDict stands for its children (or, with `containers="skip"`, for nothing), which
    the warnings, the second result, say.

    Raises:
        ParallelismValueError: rules of which a part matches nothing and that are not optional, or that
            set nothing; all of them at once.
    """
    modules = structure.modules
    merged: dict[str, dict[str, tuple[Any, str]]] = {}
    faults: list[str] = []
    warnings: dict[str, None] = {}
    for rule in rules:
        names = select(rule.match, modules)
        if not rule.optional:
            faults += [
                f"No module matches {spell(part)}.{_neighbour(part, modules)} "
                "(Rule(..., optional=True) allows that.)"
                for part in _parts(rule.match)
                if not select(part, modules)
            ]
        chosen: dict[str, None] = {}
        for name in names:
            inner = [structure.first[name]]
            if isinstance(modules[name], (nn.ModuleList, nn.ModuleDict)) and not has_forward(modules[name]):
                inner = children_of(name, structure)
                if not set(inner) <= set(names):
                    warnings[container_text(name, modules[name], containers)] = None
                inner = inner if containers == "expand" else []
            chosen.update(dict.fromkeys(inner))
        keys = [f.name for f in fields(rule) if f.name not in {"match", "optional"}]
        source = f"rule {spell(rule.match)}"
        given = {key: (getattr(rule, key), source) for key in keys if getattr(rule, key) is not None}
        if not given:
            faults.append(f"The {source} sets nothing; give it one of {', '.join(keys)}.")
        for name in chosen:
            merged.setdefault(name, {}).update(given)
    if faults:
        raise ParallelismValueError("\n".join(faults))
    return merged, list(warnings)


def spell(match: Match) -> str:
    """A rule's `match` as its author would write it; the same on every rank."""
    if isinstance(match, (list, tuple)):
        return "[" + ", ".join(spell(part) for part in match) + "]"
    if isinstance(match, re.Pattern):
        return repr(f"re:{match.pattern}")
    return repr(match) if isinstance(match, str) else getattr(match, "__qualname__", type(match).__name__)


def _parts(match: Match) -> list[Match]:
    """`match`, or what a list of several holds."""
    if isinstance(match, (list, tuple)):
        return [inner for part in match for inner in _parts(part)]
    return [match]


def _type_names(module: nn.Module) -> set[str]:
    """A module's class and base classes, by name and by full name."""
    kinds = type(module).__mro__
    return {name for k in kinds for name in (k.__qualname__, f"{k.__module__}.{k.__qualname__}")}


def _neighbour(match: Match, modules: Mapping[str, nn.Module]) -> str:
    if not isinstance(match, str):
        return ""
    if match.startswith("type:"):
        return near_miss(match, {f"type:{type(module).__qualname__}" for module in modules.values()})
    return near_miss(match.removeprefix("re:"), list(modules))


def children_of(name: str, structure: Structure) -> list[str]:
    """The first names of what a bare container holds; of what those hold which are containers too."""
    found: list[str] = []
    for key, child in structure.modules[name]._modules.items():
        path = f"{name}.{key}" if name else key
        if child is not None and path in structure.modules:
            found += [structure.first[path]] if has_forward(child) else children_of(path, structure)
    return found


def container_text(name: str, module: nn.Module, containers: str) -> str:
    """The warning that a container is none of the units."""
    skipped = "it is skipped" if containers == "skip" or not module._modules else "its children stand for it"
    return f"{name or 'The root'} is a {type(module).__name__}, which has no forward of its own; {skipped}."
