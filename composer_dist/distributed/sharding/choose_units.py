"""Chooses the units: by rule, by the caller's policy, by attribute, or by the model's structure.

The first of these that has an answer for a module decides. The structure decides only if the others have
chosen no unit.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from composer_dist import _torch
from composer_dist._torch import CustomPolicy
from composer_dist.distributed.wishes import UNIT_FIELDS, Wishes, WrapPolicy, check_function
from composer_dist.errors import ParallelismKeyError, ParallelismTypeError, ParallelismValueError
from composer_dist.structure.blocks import has_forward, holds_parameters, structural_units
from composer_dist.structure.families import is_a
from composer_dist.structure.names import ancestors
from composer_dist.structure.select import children_of, container_text, inherited
from composer_dist.structure.structure import Structure

_OPTION_TYPES: dict[str, tuple[type, ...]] = {
    "reshard_after_forward": (bool, int),
    "mp_policy": (MixedPrecisionPolicy,),
    "offload_policy": (OffloadPolicy,),
}


@dataclass(frozen=True)
class Choice:
    """The choice for a module, and why."""

    unit: bool
    reason: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """The policy's options and the rule's fields, by name, which override the configuration."""


@dataclass(frozen=True)
class Choices:
    """The choices for a whole model; modules by their first names."""

    units: Mapping[str, Choice]
    """The chosen units, in the order of the model; the root is included if it manages what is left."""
    plain: Mapping[str, str]
    """Modules whose parameters stay replicated, each with the reason."""
    warnings: tuple[str, ...] = ()


def choose_units(structure: Structure, wishes: Wishes) -> Choices:
    """Decide for every module of a model whether it is a unit, and why."""
    modules, rules, policy = structure.modules, wishes.rules, wishes.wrap_policy
    chosen: dict[str, Choice] = {}
    unasked: set[str] = set()
    """Children of a ComposerModel that nobody has asked for."""
    plain = {
        structure.first[name]: "a metric runs outside the model's forward"
        for name, module in modules.items()
        if _is_metric(module) and holds_parameters(module)
    }
    skippable, asked = wishes.ruled("skippable"), inherited(modules, "fsdp_wrap_fn")
    for function in {id(one): one for one in asked.values() if one is not None}.values():
        check_function("fsdp_wrap_fn", function)
    for name in modules:  # a rank that skips one name of a module may skip the module
        if (above := _first_above(name, skippable)) is not None:
            skippable.setdefault(structure.first[name], skippable[above])
    for name, module in modules.items():
        if structure.first[name] != name:
            continue
        shard, source = rules.get(name, {}).get("shard", (None, ""))
        if (above := _first_above(name, skippable)) is not None:
            how, skips = skippable[above]
            if not name or shard:
                raise ParallelismValueError(
                    f"The {source or skips} makes {name or 'the root'} a unit, but the {skips} lets ranks "
                    f"skip {above or 'it'}, and a unit needs every rank. Remove one of them."
                )
            if how == "replicate" and name == above:
                plain[name] = f"the {skips} lets ranks skip it"
            elif shard is False:
                plain[name] = f"{source} leaves it replicated"
            continue
        if shard is False:
            plain[name] = f"{source} leaves it replicated"
        elif shard:
            chosen[name] = Choice(True, source)
        elif (choice := _ask(name, module, asked[name], policy)) is not None:
            chosen[name] = choice
        elif name in wishes.children:
            chosen[name] = Choice(True, "it is a direct child of the ComposerModel")
            unasked.add(name)
    chosen, expanded = _expand(chosen, structure, wishes.config.containers)
    refused_root = any(shard for shard, _ in wishes.ruled("shard").values())
    refused_root |= "" in plain or ("" in chosen and not chosen[""].unit)
    units = {n: choice for n, choice in chosen.items() if choice.unit and _first_above(n, skippable) is None}
    if not units and (policy is not None or any(asked.values())):
        raise ParallelismValueError(
            "Nothing would be sharded: the wrap policy (fsdp_wrap_policy or fsdp_wrap_fn) chooses no "
            "module. Return True for at least one, or remove the policy."
        )
    if units.keys() <= unasked:
        for name, reason in structural_units(structure):
            if name not in chosen and _first_above(name, {**plain, **skippable}) is None:
                units[name] = Choice(True, reason)
    if not refused_root:
        for name in [""] if has_forward(modules[""]) else children_of("", structure):
            name = structure.first[name]
            free = name not in {**chosen, **plain} and _first_above(name, skippable) is None
            if free and (not name or holds_parameters(modules[name])):
                units.setdefault(name, Choice(True, f"{name or 'the root'} manages what no other unit does"))
    units = {n: _with_rules(units[n], rules.get(n, {})) for n in modules if n in units}
    return Choices(units, plain, tuple(expanded))


def _first_above(name: str, names: Mapping[str, Any]) -> str | None:
    return next((above for above in ancestors(name) if above in names), None) if names else None


def _with_rules(choice: Choice, rules: Mapping[str, tuple[Any, str]]) -> Choice:
    options = dict(choice.options)
    for key, other in (("mixed_precision", "mp_policy"), ("offload", "offload_policy")):
        if key in rules:
            options.pop(other, None)
    options.update({key: rules[key][0] for key in UNIT_FIELDS if key in rules})
    return replace(choice, options=options)


def _ask(
    name: str, module: nn.Module, function: Callable[[nn.Module], Any] | None, policy: WrapPolicy | None
) -> Choice | None:
    """The answer of the caller's policy, else of the attributes, for one module; None if there is none.

    If a function returns False, the module may still be chosen in another way.
    """
    if policy is not None:
        decide = _torch.policy_function(policy) if isinstance(policy, CustomPolicy) else policy
        return _read_answer(decide(module), name, "fsdp_wrap_policy")
    own = getattr(module, "_fsdp_wrap", None)
    if own is not None:
        return Choice(bool(own), f"_fsdp_wrap={bool(own)}")
    return None if function is None else _read_answer(function(module), name, "fsdp_wrap_fn")


def _read_answer(answer: Any, name: str, source: str) -> Choice | None:
    if not isinstance(answer, (bool, dict)):
        raise ParallelismTypeError(
            f"{source} must return True, False or a dictionary of options, but returned "
            f"{type(answer).__name__} for module {name!r}."
        )
    options = dict(answer) if isinstance(answer, dict) else {}
    if unknown := sorted(set(options) - set(_OPTION_TYPES)):
        raise ParallelismKeyError(
            f"{source} returned the unknown option{'s' * (len(unknown) > 1)} {', '.join(map(repr, unknown))} "
            f"for module {name!r}. Valid keys are: {', '.join(_OPTION_TYPES)}."
        )
    for key, value in options.items():
        if value is not None and not isinstance(value, _OPTION_TYPES[key]):
            raise ParallelismTypeError(
                f"{source}: option {key!r} for module {name!r} must be "
                f"{' or '.join(kind.__name__ for kind in _OPTION_TYPES[key])}, not {type(value).__name__}."
            )
    given = {key: value for key, value in options.items() if value is not None}
    return Choice(True, source, given) if answer else None


def _expand(
    chosen: Mapping[str, Choice], structure: Structure, containers: str
) -> tuple[dict[str, Choice], list[str]]:
    """The choices with the children of units that have no forward, or without such units; and warnings."""
    expanded: dict[str, Choice] = {}
    warnings: list[str] = []
    for name, choice in chosen.items():
        module = structure.modules[name]
        if has_forward(module) or not choice.unit:
            expanded.setdefault(name, choice)
            continue
        children = dict.fromkeys(structure.first[inner] for inner in children_of(name, structure))
        missing = [inner for inner in children if inner not in chosen]
        if missing or not module._modules:
            warnings.append(container_text(name, module, containers))
        if containers == "expand":
            for inner in missing:
                expanded[inner] = Choice(True, f"{choice.reason}, through {name}", choice.options)
    return expanded, warnings


def _is_metric(module: nn.Module) -> bool:
    return is_a(module, "Metric", "MetricCollection")


def composer_children(model: nn.Module) -> tuple[str, ...]:
    """The names of a ComposerModel's direct children that are units: all except its metrics.

    A bare ModuleList or ModuleDict is not a unit, because it is never called; its blocks are found by
    structure.
    """
    from composer_dist.composer_model import ComposerModel

    if not isinstance(model, ComposerModel):
        raise ParallelismTypeError(
            f"parallelize_composer_model prepares a ComposerModel, not a {type(model).__name__}; "
            "parallelize_model prepares any module."
        )
    return tuple(
        name
        for name, child in model.named_children()
        if holds_parameters(child) and has_forward(child) and not _is_metric(child)
    )
