"""Which unit manages which parameter.

A *unit* is a module (or several, where a tie forces them together) whose parameters are gathered and
reduced in one collective. A parameter belongs to the unit of its nearest ancestor; a tie to the
nearest unit that contains all of its owners, which is gathered whenever any of them runs. Because
every unit's exact parameters are known, sharding goes top down: an outer unit may hold a parameter
that lies, by name, inside an inner one. No tie has to be cut, and no blocks to be merged, for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor

from composer_dist.distributed.aliases import Structure, TensorInfo, ancestors
from composer_dist.distributed.policies import Choice, Choices, has_forward, is_sharded
from composer_dist.errors import ParallelismValueError


@dataclass
class Group:
    """A unit in the making."""

    modules: list[str]
    choice: Choice
    parameters: list[str] = field(default_factory=list)
    split: bool = False
    """Whether it exists only to keep dtypes apart."""


@dataclass(frozen=True)
class Assignment:
    """Every parameter's home."""

    groups: tuple[Group, ...]
    """In the order of the model, outer before inner."""
    plain: Mapping[str, str]
    """Parameters kept whole on every rank, each with the reason."""
    skipped: Mapping[str, str]
    """Modules that were chosen but are no units, each with the reason."""
    warnings: tuple[str, ...]


def assign(structure: Structure, choices: Choices) -> Assignment:
    """Give every parameter of the model to one unit, or leave it plain.

    Raises:
        ParallelismValueError: ties or dtypes that no arrangement of units can hold (all of them
            named at once); a model in which nothing is left to shard.
    """
    skipped, warnings = _already_sharded(structure, choices)
    chosen = {name: choice for name, choice in choices.modules.items() if choice.unit}
    if choices.root is not None:
        chosen[""] = choices.root
    groups = {
        name: Group([name], chosen[name])
        for name in structure.modules
        if name in chosen and name not in skipped
    }
    plain: dict[str, str] = {}
    faults: list[str] = []
    for name, held in structure.parameters.items():
        if isinstance(held.get(), DTensor):
            continue  # sharded by the user's own code, and left as it is
        reason = _why_plain(held.info, choices, groups)
        home = None if reason else _home(held.info, groups, faults)
        if home is None:
            plain[name] = reason or "no unit contains it"
        else:
            home.parameters.append(name)
    _split_by_dtype(structure, groups, faults)
    if faults:
        raise ParallelismValueError("\n".join(faults))
    for name, group in list(groups.items()):
        if not group.parameters and name:
            has_some = any(True for _ in structure.modules[name].parameters())
            skipped[name] = (
                "an outer unit holds all of its parameters, or they stay plain"
                if has_some
                else "it has no parameters"
            )
            del groups[name]
    if not any(group.parameters for group in groups.values()):
        raise ParallelismValueError(
            "Nothing would be sharded: "
            + (
                "no unit gets a parameter."
                if structure.parameters
                else "the model has no parameters."
            )
        )
    if "" not in groups and any(len(group.modules) > 1 for group in groups.values()):
        groups[""] = Group([""], Choice(True, "it coordinates units of several modules"))
    unique = {id(groups[name]): groups[name] for name in structure.modules if name in groups}
    return Assignment(tuple(unique.values()), plain, skipped, tuple(warnings))


def _already_sharded(structure: Structure, choices: Choices) -> tuple[dict[str, str], list[str]]:
    """Chosen modules that the user's own code has sharded, or that lie inside one that is."""
    sharded = {name for name, module in structure.modules.items() if is_sharded(module)}
    skipped = {
        name: "it is sharded already, or lies inside a module that is"
        for name, choice in {**choices.modules, "": choices.root}.items()
        if choice is not None and choice.unit and any(above in sharded for above in ancestors(name))
    }
    if "" in sharded:
        raise ParallelismValueError("The model is sharded already; prepare a model once.")
    listed = ", ".join(sorted(set(skipped) | sharded))
    return skipped, [f"Sharded already, left as it is: {listed}."] if sharded else []


def _why_plain(info: TensorInfo, choices: Choices, groups: Mapping[str, Group]) -> str | None:
    if not info.shape:
        return "a scalar has no dimension to shard"
    if 0 in info.shape:
        return "it is empty"
    for owner in info.owners:
        nearest = next(
            (above for above in ancestors(owner) if above in choices.plain or above in groups), None
        )
        if nearest is not None and nearest in choices.plain:
            return choices.plain[nearest]
    return None


def _home(info: TensorInfo, groups: dict[str, Group], faults: list[str]) -> Group | None:
    """The nearest unit that contains every owner; without one, the owners' own units become one."""
    chains = [[above for above in ancestors(owner) if above in groups] for owner in info.owners]
    for name in chains[0]:
        if all(name in chain for chain in chains):
            return groups[name]
    if not all(chains):
        return None
    nearest = list(dict.fromkeys(chain[0] for chain in chains))
    first, *others = nearest
    for other in others:
        if groups[other].choice.options != groups[first].choice.options:
            faults.append(
                f"{' and '.join(info.names)} are one parameter, but their units {first!r} and {other!r} "
                "have different options; give both the same, or make a common ancestor a unit."
            )
        elif groups[other] is not groups[first]:
            groups[first].modules += groups[other].modules
            groups[first].parameters += groups[other].parameters
            for name in groups[other].modules:
                groups[name] = groups[first]
    return groups[first]


def _split_by_dtype(structure: Structure, groups: dict[str, Group], faults: list[str]) -> None:
    """FSDP2 reduces one dtype per unit: move the trainable minority into units of its own."""
    for group in list({id(group): group for group in groups.values()}.values()):
        infos = {name: structure.tensors[name].info for name in group.parameters}
        sizes: dict[torch.dtype, int] = {}
        for info in infos.values():
            if info.requires_grad:
                sizes[info.dtype] = sizes.get(info.dtype, 0) + info.nbytes
        if len(sizes) < 2:
            continue
        main = max(sizes, key=lambda dtype: sizes[dtype])
        stuck: list[str] = []
        for name, info in infos.items():
            if not info.requires_grad or info.dtype == main or name not in group.parameters:
                continue
            part = _uniform_part(info, group, infos, structure)
            if part is None:
                stuck.append(f"{name} ({_short(info.dtype)})")
                continue
            reason = f"holds {_short(info.dtype)} where {group.modules[0] or 'the root'} holds {_short(main)}"
            inner = Group([part], Choice(True, reason, group.choice.options), split=True)
            inner.parameters = [
                n for n, i in infos.items() if _inside(i, part) and n in group.parameters
            ]
            group.parameters = [n for n in group.parameters if n not in inner.parameters]
            groups[part] = inner
        if stuck:
            faults.append(
                f"{group.modules[0] or 'the root'} trains {_short(main)} parameters, and also "
                f"{', '.join(stuck)}, which no submodule holds apart. Convert them, freeze them, or "
                "leave their module replicated with Rule(..., shard=False)."
            )


def _uniform_part(
    info: TensorInfo, group: Group, infos: Mapping[str, TensorInfo], structure: Structure
) -> str | None:
    """The outermost module inside `group` that holds `info` and trains no other dtype."""
    best = None
    for above in ancestors(info.owners[0]):
        if above in group.modules:
            break
        inside = [
            other for other in infos.values() if any(_below(owner, above) for owner in other.owners)
        ]
        if not all(_inside(other, above) for other in inside):
            break  # a tie leads out of it
        if any(other.requires_grad and other.dtype != info.dtype for other in inside):
            break
        if has_forward(structure.modules[above]):
            best = above
    return best if best is not None and _inside(info, best) else None


def _inside(info: TensorInfo, module: str) -> bool:
    return all(_below(owner, module) for owner in info.owners)


def _below(owner: str, module: str) -> bool:
    return owner == module or owner.startswith(f"{module}.")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
