"""Selects modules for the user's rules by name, type or function."""

import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from composer_dist.config.rule import Match
from composer_dist.errors import ParallelismValueError
from composer_dist.structure.blocks import has_forward
from composer_dist.structure.structure import Structure
from composer_dist.wording import near_miss

_EXPLOSIVE = re.compile(r"\)[*+{]|([*+}].*){5}", re.S)
"""A repeated group, or many repeats: a match may take time that is exponential in the length of a name."""
_SLOW = 0.1
"""Seconds of the CPU for one match; others take microseconds."""


def select(match: Match, modules: Mapping[str, nn.Module]) -> list[str]:
    """The names in `modules` that `match` selects, in the order of the model (see `Rule.match`)."""
    match match:
        case list() | tuple():
            chosen = {name for part in match for name in select(part, modules)}
            return [name for name in modules if name in chosen]
        case str() if match.startswith("re:"):
            return matching(re.compile(match[3:]), modules)
        case str() if match.startswith("type:"):
            return [name for name, module in modules.items() if match[5:] in _type_names(module)]
        case str():
            return [match] if match in modules else []
        case re.Pattern():
            return matching(match, modules)
        case type():
            return [name for name, module in modules.items() if isinstance(module, match)]
        case _:
            return [name for name, module in modules.items() if match(name, module)]


def matching(pattern: re.Pattern[str], names: Iterable[str]) -> list[str]:
    """The names that a pattern matches in full.

    Raises:
        ParallelismValueError: the pattern is one of those whose matches take hours.
    """
    names = list(names)
    if _EXPLOSIVE.search(pattern.pattern):
        _check_time(pattern, names)
    return [name for name in names if pattern.fullmatch(name)]


def _check_time(pattern: re.Pattern[str], names: Iterable[str]) -> None:
    """Match longer and longer parts of each name: with every character it takes some times as long.

    The end of a line after a part makes patterns fail that would match it.
    """
    before = ""
    for name in names:
        same = next(
            (n for n, pair in enumerate(zip(before, name, strict=False)) if pair[0] != pair[1]), len(before)
        )
        for end in range(same + 1, len(name) + 1):
            for tried in (name[:end], f"{name[:end]}\n"):
                start = time.thread_time()
                pattern.fullmatch(tried)
                if time.thread_time() - start > _SLOW:
                    raise ParallelismValueError(
                        f"{spell(pattern)} takes too long to match: {_SLOW} s for {name[:end]!r}, and with "
                        "every character a multiple of it. Write it without a repeat inside of a repeat."
                    )
        before = name


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
    if match.startswith("re:"):
        return near_miss(match, {one for name in modules for one in _patterns(name)})
    return near_miss(match, modules)


def _patterns(name: str) -> tuple[str, str]:
    """Regular expressions for the module alone, and for all with other numbers."""
    parts = [re.escape(part) for part in name.split(".")]
    numbers = [r"\d+" if part.isdecimal() else part for part in parts]
    return "re:" + r"\.".join(parts), "re:" + r"\.".join(numbers)


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
