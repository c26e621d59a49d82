"""Rules: which modules each one selects, and what they say together.

Selecting needs nothing but the names and the modules; what becomes of the selected is for others
(`policies`, `checkpoint_plan`, `tensor_parallel`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from torch import nn

from composer_dist.config import presets as presets
from composer_dist.config.resolve import register_strategy as register_strategy
from composer_dist.config.rule import Rule
from composer_dist.errors import ParallelismValueError
from composer_dist.structure.blocks import has_forward
from composer_dist.structure.select import children_of, container_text, neighbor, parts_of, select, spell
from composer_dist.structure.structure import Structure
from composer_dist.tensors.codec import register_tensor_codec as register_tensor_codec


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
                f"No module matches {spell(part)}.{neighbor(part, modules)} "
                "(Rule(..., optional=True) allows that.)"
                for part in parts_of(rule.match)
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
