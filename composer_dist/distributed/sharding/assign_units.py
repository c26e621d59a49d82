"""Assigns every parameter to a unit.

A *unit* is a module (or several, joined by a tie) whose parameters are gathered and reduced in one
collective. A parameter belongs to the unit of its nearest ancestor, and a tie to the nearest unit that
contains all of its owners, which is gathered whenever one of them runs. Units are sharded top down with their
exact parameters, so an outer unit may hold a parameter of a module inside an inner unit, without cutting a
tie or merging blocks.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import cast

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from composer_dist._torch import is_initialized
from composer_dist.distributed.prepared import ALREADY_SHARDED
from composer_dist.distributed.sharding.choose_units import Choice, Choices
from composer_dist.distributed.wishes import Wishes
from composer_dist.errors import Faults, ParallelismTypeError, ParallelismValueError
from composer_dist.structure.blocks import has_forward, holds_parameters
from composer_dist.structure.names import ancestors
from composer_dist.structure.structure import Structure, TensorInfo
from composer_dist.wording import dtype_name


@dataclass(eq=False)
class Draft:
    """A preliminary unit; modules and parameters by their first names."""

    modules: list[str]
    choice: Choice
    parameters: list[str] = field(default_factory=list)
    split: bool = False
    """Whether it only separates dtypes."""

    @property
    def name(self) -> str:
        """The first module's name, for messages."""
        return self.modules[0] or "the root"


@dataclass(frozen=True)
class Assignment:
    """The unit of every parameter."""

    groups: tuple[Draft, ...]
    """In the order of the model, outer before inner."""
    plain: Mapping[str, str]
    """Parameters that stay whole on every rank, each with the reason."""
    homeless: frozenset[str] = frozenset()
    """Those plain parameters that no unit contains."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Modules that were chosen but did not become units, each with the reason."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Skippable:
    """A module that ranks may skip."""

    module: str
    parameters: tuple[str, ...]
    """First names of its trainable parameters that belong to `unit`."""
    unit: str | None
    """A module of the outer unit that holds them; None with "replicate"."""


def assign(structure: Structure, choices: Choices, shards: int) -> Assignment:
    """Assign every parameter to one unit, or leave it plain; `shards` ranks share each parameter."""
    skipped, warnings = _already_sharded(structure, choices)
    groups = {name: Draft([name], one) for name, one in choices.units.items() if name not in skipped}
    plain: dict[str, str] = {}
    homeless: set[str] = set()
    with Faults() as faults:
        for name, held in structure.parameters.items():
            if isinstance(held.get(), DTensor):
                continue  # sharded by the user's own code
            reason = _why_plain(held.info, structure, choices, groups)
            if held.info.inner and shards == 1:  # FSDP2 then returns only the first inner tensor (2.13)
                reason = reason or "it has several inner tensors, which FSDP2 gathers only from several ranks"
            home = None
            with faults.catching():
                home = None if reason else _home(held.info, structure, groups)
            if home is not None:
                home.parameters.append(name)
                continue
            if not reason:
                homeless.add(name)
            plain[name] = reason or "no unit contains it (Rule('', shard=True) makes the root one)"
        for group in dict.fromkeys(groups.values()):
            with faults.catching():
                groups.update(_split_by_dtype(group, structure))
    for name in [name for name, group in groups.items() if name and not group.parameters]:
        skipped[name] = "it has no parameters"
        if holds_parameters(structure.modules[name]):
            skipped[name] = "its parameters stay plain or belong to outer units"
        del groups[name]
    if not any(group.parameters for group in groups.values()):
        why = "no unit gets a parameter" if structure.parameters else "the model has no parameters"
        raise ParallelismValueError(f"Nothing would be sharded: {why}.")
    if "" not in groups and any(len(group.modules) > 1 for group in groups.values()):
        groups[""] = Draft([""], Choice(True, "it coordinates units of several modules"))
    ordered = dict.fromkeys(groups[name] for name in structure.modules if name in groups)
    return Assignment(tuple(ordered), plain, frozenset(homeless), skipped, tuple(warnings))


def _already_sharded(structure: Structure, choices: Choices) -> tuple[dict[str, str], list[str]]:
    """Chosen modules that the user's own code has sharded, or that are inside such a module."""
    old = FullyShardedDataParallel
    if wrapped := [name or "the root" for name, m in structure.modules.items() if isinstance(m, old)]:
        raise ParallelismTypeError(
            f"{', '.join(wrapped)} {'is' if len(wrapped) == 1 else 'are'} wrapped in FSDP1 "
            "(FullyShardedDataParallel), which FSDP2 replaces; prepare the plain module."
        )
    sharded = {name for name, module in structure.modules.items() if isinstance(module, FSDPModule)}
    if "" in sharded:
        raise ParallelismValueError(ALREADY_SHARDED)
    used = [n for n in sorted(sharded) if is_initialized(cast(FSDPModule, structure.modules[n]))]
    if used:
        raise ParallelismValueError(
            f"{used[0]} is a model that was prepared already, or has run under FSDP2, so it cannot become a "
            "part of another. Prepare the whole once, before any of its parts."
        )
    skipped = {
        name: "it, or a module that contains it, is already sharded"
        for name in choices.units
        if any(above in sharded for above in ancestors(name))
    }
    listed = ", ".join(name for name in structure.modules if name in sharded or name in skipped)
    return skipped, [f"Already sharded, left unchanged: {listed}."] if sharded else []


def _why_plain(
    info: TensorInfo, structure: Structure, choices: Choices, groups: Mapping[str, Draft]
) -> str | None:
    if not info.shape:
        return "a scalar has no dimension to shard"
    if 0 in info.shape:
        return "it is empty"
    for owner in info.owners:
        above = (structure.first[name] for name in ancestors(owner))
        nearest = next((name for name in above if name in choices.plain or name in groups), None)
        if nearest is not None and nearest in choices.plain:
            return choices.plain[nearest]
    return None


def _home(info: TensorInfo, structure: Structure, groups: dict[str, Draft]) -> Draft | None:
    """The nearest unit that contains every owner; if there is none, the owners' units are joined."""
    firsts = [[structure.first[above] for above in ancestors(owner)] for owner in info.owners]
    chains = [[groups[name] for name in names if name in groups] for names in firsts]
    for group in chains[0]:
        if all(group in chain for chain in chains):
            return group
    if not all(chains):
        return None
    one, *others = dict.fromkeys(chain[0] for chain in chains)
    with Faults() as faults:
        for other in others:
            if other.choice.options != one.choice.options:
                faults.append(
                    f"{' and '.join(info.names)} are one parameter, but their units {one.name} and "
                    f"{other.name} have different options; give both the same options, or make a common "
                    "ancestor a unit."
                )
                continue
            _join(one, other, structure)
            groups.update({name: one for name, group in groups.items() if group is other})
    return one


def _join(one: Draft, other: Draft, structure: Structure) -> None:
    """Add another group to one; an outer module also represents the modules inside it."""
    one.parameters += other.parameters
    names = {*one.modules, *other.modules}
    one.modules = [
        name
        for name in structure.modules
        if name in names and not any(above in names for above in ancestors(name) if above != name)
    ]


def _split_by_dtype(group: Draft, structure: Structure) -> dict[str, Draft]:
    """Split a unit that trains several dtypes, because FSDP2 reduces one dtype per unit.

    The dtype with the most bytes stays, if all others have separate submodules; otherwise the next one.
    """
    infos = {name: structure.tensors[name].info for name in group.parameters}
    inside = {name: list(_modules_around(info, group, structure)) for name, info in infos.items()}
    sizes: dict[torch.dtype, int] = {}
    dtypes: dict[str, set[torch.dtype]] = {}  # module to the dtypes that are trained entirely inside it
    for name, info in infos.items():
        if info.requires_grad:
            sizes[info.dtype] = sizes.get(info.dtype, 0) + info.nbytes
            for module in inside[name]:
                dtypes.setdefault(module, set()).add(info.dtype)
    if len(sizes) < 2:
        return {}
    stuck: dict[torch.dtype, list[str]] = {}
    for main in sorted(sizes, key=lambda dtype: -sizes[dtype]):
        parts: dict[str, torch.dtype] = {}
        for name, info in infos.items():
            if info.requires_grad and info.dtype != main:
                fit = [m for m in inside[name] if len(dtypes[m]) == 1 and has_forward(structure.modules[m])]
                if fit:
                    parts[fit[-1]] = info.dtype
                else:
                    stuck.setdefault(main, []).append(f"{name} ({dtype_name(info.dtype)})")
        if main not in stuck:
            return _cut(group, inside, parts, main)
    main = next(iter(stuck))
    raise ParallelismValueError(
        f"{group.name} trains {dtype_name(main)} parameters, and also {', '.join(stuck[main])}, which are in "
        "no separate submodule. Convert them, freeze them, or leave their module replicated with "
        "Rule(..., shard=False)."
    )


def _cut(
    group: Draft, inside: Mapping[str, list[str]], parts: Mapping[str, torch.dtype], main: torch.dtype
) -> dict[str, Draft]:
    cut: dict[str, Draft] = {}
    kept: list[str] = []
    for name in group.parameters:
        part = next((module for module in inside[name] if module in parts), None)
        if part is None:
            kept.append(name)
            continue
        if part not in cut:
            reason = f"it trains {dtype_name(parts[part])} where {group.name} trains {dtype_name(main)}"
            cut[part] = Draft([part], Choice(True, reason, group.choice.options), split=True)
        cut[part].parameters.append(name)
    group.parameters = kept
    return cut


def _modules_around(info: TensorInfo, group: Draft, structure: Structure) -> Iterator[str]:
    """The modules below a group's own that contain all owners of a tensor, innermost first."""
    others = [set(ancestors(owner)) for owner in info.owners[1:]]
    for above in ancestors(info.owners[0]):
        if structure.first[above] in group.modules:
            return
        if all(above in other for other in others):
            yield structure.first[above]


def plan_skippable(structure: Structure, wishes: Wishes, assignment: Assignment) -> Iterator[Skippable]:
    """The modules that rules with `skippable` allow ranks to skip."""
    homes = {name: group for group in assignment.groups for name in group.parameters}
    skippable = wishes.ruled("skippable")
    for module, inside in structure.inside(skippable).items():
        how, source = skippable[module]
        units: dict[str | None, list[str]] = {}
        for name in (info.name for info in inside if info.kind == "parameter"):
            unit = None if how == "replicate" else _unit_around(name, module, homes, assignment, source)
            if structure.parameters[name].info.requires_grad:
                units.setdefault(unit, []).append(name)
        yield from (Skippable(module, tuple(names), unit) for unit, names in units.items())


def _unit_around(
    name: str, module: str, homes: Mapping[str, Draft], assignment: Assignment, source: str
) -> str | None:
    """The module of the unit that holds a parameter of a skippable module; None for a scalar."""
    home = homes.get(name)
    if home is None:
        if name not in assignment.homeless:
            return None
        raise ParallelismValueError(
            f"The {source} assigns the parameters of {module} to the unit that contains it, but there is "
            "none. Add Rule('', shard=True), or use skippable='replicate'."
        )
    unit = next((above for above in ancestors(module) if above in home.modules), module)
    if unit == module:
        raise ParallelismValueError(
            f"The {source} lets ranks skip {module}, but {home.name} inside it is a unit, because "
            f"{home.choice.reason}. Use skippable='replicate'."
        )
    return unit
