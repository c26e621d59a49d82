"""Matches the tensor names of a checkpoint with a model's.

A checkpoint may come from the model, from a part of it, or from before it was wrapped by peft, DDP, a
compiler, a checkpoint wrapper or a `ComposerModel`. A tied tensor may have any of its names, and transformers
models have tables of older names. Names without a counterpart on the other side are listed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from composer_dist import _torch
from composer_dist.errors import CheckpointValueError
from composer_dist.files.adapters import (
    adapter_entries,
    base_models,
    changed_settings,
    check_base,
    without_adapters,
)
from composer_dist.files.index import Entry
from composer_dist.files.mismatch import StateMismatch
from composer_dist.files.transformers import convert, is_ignored
from composer_dist.structure.names import canonical_name
from composer_dist.structure.structure import Held, Structure
from composer_dist.tensors.blueprint import Blueprint
from composer_dist.wording import dtype_name, listed

_PREFIXES = ("", "module.", "base_model.model.")
"""Prefixes that wrappers add to all names of a checkpoint: none, DDP's, peft's."""


@dataclass
class Match:
    """The tensors of a checkpoint that belong to a model."""

    tensors: dict[str, Blueprint] = field(default_factory=dict)
    """First name of a tensor to its blueprint."""
    missing: list[str] = field(default_factory=list)
    """First names of tensors that the model saves and the checkpoint lacks."""
    unexpected: list[str] = field(default_factory=list)
    """The checkpoint's names of tensors that the model does not have."""
    keys: dict[str, list[str]] = field(default_factory=dict)
    """First name of a tensor to its names in the checkpoint."""
    stale: list[str] = field(default_factory=list)
    """Names of tensors of adapters that were computed from other weights than the checkpoint's."""
    changed: list[str] = field(default_factory=list)
    """Settings that scale the checkpoint's adapter in another way than the model's."""
    twins: list[tuple[str, Blueprint]] = field(default_factory=list)
    """First name of a tied tensor, and a second blueprint that the checkpoint has under another name."""
    extra: dict[str, nn.Module] = field(default_factory=dict)
    """The checkpoint's names of extra state to the modules that it is meant for."""
    adapter: bool = False
    """Whether the checkpoint is an adapter's."""

    def put(self, first: str, value: Blueprint, keys: tuple[str, ...]) -> None:
        """Add a tensor, which may be tied and have several names in the checkpoint."""
        if self.tensors.setdefault(first, value) is not value:
            self.twins.append((first, value))
        self.keys.setdefault(first, []).extend(keys)

    def add_extra_state(self, structure: Structure, given: Sequence[str]) -> None:
        """Find the module that each extra state of a checkpoint is meant for, by the names in `given`."""
        owners, bases = structure.extra_states, ["", *(base for base, _ in base_models(structure))]
        for key in given:
            bare = [canonical_name(key).removeprefix(prefix) for prefix in _PREFIXES]
            found = [f"{base}{name}" for name in bare for base in bases if f"{base}{name}" in owners]
            if found:
                self.extra[key] = owners[found[0]]
            else:
                self.unexpected.append(key)
        here = {id(module) for module in self.extra.values()}
        if not self.adapter:
            self.missing += [name for name, module in owners.items() if id(module) not in here]

    def check(self, structure: Structure, entries: Mapping[str, Entry], strict: bool, path: Path) -> None:
        """Raise unless the checkpoint, which is at `path`, matches the model.

        Raises:
            CheckpointValueError: shapes or dtypes do not match.
            CheckpointKeyError: `strict`, and names are missing or unexpected.
        """
        if strict and self.changed:
            raise CheckpointValueError(
                f"The adapter in {path} was trained with {listed(self.changed)}, and would compute something "
                "else here. Make the model's adapter with PeftConfig.from_pretrained, or pass strict=False."
            )
        misfits = [
            fault
            for name, blueprint in self.tensors.items()
            for fault in _misfits(structure.tensors[name], blueprint, entries, self.keys[name])
        ]
        mismatch = StateMismatch(self.missing, self.unexpected, misfits)
        adapted = any(".lora_" in name for name in self.unexpected)
        whose = f"{path}, of a model with LoRA," if adapted else path
        mismatch.check(f"The checkpoint {whose} does not match the model", strict)


def match_names(
    structure: Structure, given: Mapping[str, Blueprint], path: Path, adapter: bool = False
) -> Match:
    """Find the tensor of the model that each tensor of a checkpoint is meant for.

    Args:
        given: the tensors of the checkpoint.
        path: the checkpoint, a file or a directory, whose name may be an adapter's.
        adapter: the checkpoint is an adapter's.

    Raises:
        CheckpointValueError: it is an adapter's, and the model has no adapter or it is unclear which one is
            meant; or transformers' conversion computes values.
    """
    names = _Names.of(structure)
    directory = path if path.is_dir() else path.parent
    own: dict[str, str] = {}
    unclear: CheckpointValueError | None = None
    try:
        own = adapter_entries(structure, directory.name)
    except CheckpointValueError as error:
        if adapter:
            raise
        unclear = error
    clean = [canonical_name(name) for name in given]
    if adapter or 2 * sum(name in own for name in clean) > len(clean):
        if not own:
            raise CheckpointValueError(
                f"The checkpoint {path} is an adapter's, but the model has none; add one with peft first."
            )
        match = _match_adapter(names, given, own)
        match.changed = changed_settings(structure, directory)
        return match
    match = _match_bases(names, given)
    if unclear is not None and 2 * len(match.unexpected) > len(given):  # it is not the base model's
        raise unclear
    match.stale = check_base(structure, match.tensors, path)
    return match


def _match_bases(names: _Names, given: Mapping[str, Blueprint]) -> Match:
    """Match a checkpoint without the prefix of a wrapper, with the model or a part of it: what fits best."""
    best: Match | None = None
    for prefix in _PREFIXES:
        if not all(canonical_name(name).startswith(prefix) for name in given):
            continue
        cut = {canonical_name(name)[len(prefix) :]: (name, value) for name, value in given.items()}
        for base in ["", *(one for one, _ in names.models if one)]:
            found = _match_base(names, cut, base)
            if best is None or len(found.unexpected) < len(best.unexpected):
                best = found
            if not best.unexpected:
                return best
    assert best is not None
    return best


@dataclass
class _Names:
    """The names of a model's tensors."""

    structure: Structure
    exact: dict[str, str]
    """Every name of a tensor that the model saves, to the tensor's first name."""
    plain: dict[str, list[str]]
    """Every name without peft's layers, to first names: of the tensor, and of copies to be trained."""
    passing: set[str]
    """Names of tensors that the model does not save: non-persistent buffers."""
    expected: list[str]
    """First names of tensors that the model saves, without adapters."""
    models: list[tuple[str, Any]]
    """Prefix and module of each transformers model or peft base model."""

    def inside(self, name: str) -> list[str]:
        """First names of the tensor that has this name, perhaps behind a wrapper's."""
        found = {first for one, first in self.exact.items() if one == name or one.endswith(f".{name}")}
        return [*found] if len(found) == 1 else []

    @classmethod
    def of(cls, structure: Structure) -> _Names:
        exact: dict[str, str] = {}
        plain: dict[str, list[str]] = {}
        passing: set[str] = set()
        expected: dict[str, None] = {}
        without = without_adapters(structure)
        for first, held in structure.tensors.items():
            if held.info.kind == "attribute":
                continue
            persistent = any(_torch.is_saved(place.module, place.key) for place in held.places)
            saved = held.info.kind == "parameter" or persistent
            for name in held.info.names:
                if not saved:
                    passing.add(without.get(name, (name,))[0])
                    continue
                exact[name] = first
                if name in without:
                    other, copy = without[name]
                    plain.setdefault(other, []).append(first)
                    if not copy:
                        expected[first] = None
        return cls(structure, exact, plain, passing, list(expected), list(base_models(structure)))


def _match_adapter(names: _Names, given: Mapping[str, Blueprint], own: Mapping[str, str]) -> Match:
    match = Match(adapter=True)
    for key, value in given.items():
        name = own.get(canonical_name(key))
        firsts = [names.exact[name]] if name in names.exact else names.plain.get(canonical_name(key), [])
        firsts = firsts or names.inside(canonical_name(key))  # an adapted embedding's, which peft saves too
        if not firsts:
            match.unexpected.append(key)
        for first in firsts:
            match.put(first, value, (key,))
    firsts = [names.exact[name] for name in own.values()]
    match.missing = [first for first in dict.fromkeys(firsts) if first not in match.tensors]
    return match


def _match_base(names: _Names, given: Mapping[str, tuple[str, Blueprint]], base: str) -> Match:
    """Match a checkpoint, by names without wrappers, with the part of the model below the prefix `base`."""
    match = Match()
    rest = {f"{base}{name}": pair for name, pair in given.items()}
    for prefix, model in [*names.models, ("", None)]:
        shapes = {
            name.removeprefix(prefix): names.structure.tensors[firsts[0]].info.shape
            for name, firsts in names.plain.items()
            if name.startswith(prefix)
        }
        mine: dict[str, tuple[str, Blueprint]] = {}
        exact: set[str] = set()
        for name in [name for name in rest if name.startswith(prefix)]:
            key, pair = name.removeprefix(prefix), rest.pop(name)
            bare = key.replace(".base_layer.", ".")
            if key not in shapes and name in names.exact:
                exact.add(names.exact[name])
                match.put(names.exact[name], pair[1], (pair[0],))
            else:
                mine[bare if key not in shapes and bare in shapes else key] = pair
        mapped = {key: value for key, (_, value) in mine.items()}
        if hasattr(model, "base_model_prefix") and mapped:  # a transformers model, which has tables
            tensors, left = convert(model, mapped, shapes)
        else:
            tensors = {key: (value, (key,)) for key, value in mapped.items() if key in shapes}
            left = {key: key for key in mapped if key not in shapes}
        for name, (value, keys) in tensors.items():
            for first in names.plain[f"{prefix}{name}"]:
                if first not in exact:
                    match.put(first, value, tuple(mine[key][0] for key in keys))
        for key, name in left.items():
            passing = any(f"{prefix}{one}" in names.passing for one in (key, name))
            if not passing and not is_ignored(model, (key, name), "unexpected"):
                match.unexpected.append(mine[key][0])
    match.missing = [
        first for first in names.expected if first not in match.tensors and not _may_miss(names, first)
    ]
    return match


def _may_miss(names: _Names, first: str) -> bool:
    every = names.structure.tensors[first].info.names
    return any(
        is_ignored(model, tuple(name[len(prefix) :] for name in every if name.startswith(prefix)), "missing")
        for prefix, model in names.models
    )


def _misfits(
    held: Held, blueprint: Blueprint, entries: Mapping[str, Entry], keys: list[str]
) -> Iterator[str]:
    info, shape = held.info, blueprint.dims
    name = info.name if keys[0] == info.name else f"{info.name} (from {', '.join(keys[:2])})"
    if shape != info.shape:
        yield f"{name} is {shape} in the checkpoint, {info.shape} in the model"
    for dtype in sorted({entries[box.source].dtype for box in blueprint.boxes}, key=str):
        if not castable(dtype, info.dtype):
            yield f"{name} is {dtype_name(dtype)} in the checkpoint, {dtype_name(info.dtype)} in the model"


def castable(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether a cast keeps the values' meaning: between floating-point dtypes, or to a wider integer.

    8-bit floating-point numbers have separate scales, so they are never cast.
    """
    if stored == wanted:
        return True
    if stored.is_floating_point and wanted.is_floating_point:
        return min(stored.itemsize, wanted.itemsize) > 1
    kinds = [dtype.is_floating_point or dtype.is_complex or dtype == torch.bool for dtype in (stored, wanted)]
    if any(kinds):
        return False
    narrow, wide = torch.iinfo(stored), torch.iinfo(wanted)
    return wide.min <= narrow.min and narrow.max <= wide.max
