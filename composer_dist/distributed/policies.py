"""How modules are chosen: by rule, by the caller's policy, by attribute, or by the model's structure.

`choose_units` asks the four in this order for every module; the first with an opinion decides. The
structure speaks only where nobody else has chosen a unit.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy

from composer_dist._torch import CustomPolicy
from composer_dist.distributed.aliases import Structure
from composer_dist.distributed.config import Match, ParallelismConfig, Rule, near_miss
from composer_dist.errors import ParallelismKeyError, ParallelismTypeError, ParallelismValueError

WrapPolicy = CustomPolicy | Callable[[nn.Module], bool | dict[str, Any]]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_OPTION_TYPES: dict[str, tuple[type, ...]] = {
    "reshard_after_forward": (bool, int),
    "mp_policy": (MixedPrecisionPolicy,),
    "offload_policy": (OffloadPolicy,),
}


@dataclass(frozen=True)
class Choice:
    """What somebody wants of a module."""

    unit: bool
    reason: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for `fully_shard` that differ from the configuration's."""


@dataclass(frozen=True)
class Choices:
    """The outcome for a whole model."""

    modules: Mapping[str, Choice]
    """The modules below the root about which somebody had an opinion, by first name."""
    plain: Mapping[str, str]
    """Modules whose parameters stay replicated, with the reason."""
    rules: Mapping[str, Mapping[str, tuple[Any, str]]]
    """Module name to the merged fields of the rules that match it, each with its rule's spelling."""
    root: Choice | None
    """The root takes the parameters that nobody else has; None where it must not."""


def has_forward(module: nn.Module) -> bool:
    """Whether `module` can be a unit: a bare container has no forward to gather for."""
    return not (
        isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict))
        and type(module).forward is nn.Module.forward
    )


def select(match: Match, modules: Mapping[str, nn.Module]) -> list[str]:
    """The names in `modules` that `match` selects, in the order of the model (see `Rule.match`).

    Raises:
        ParallelismTypeError: `match` is none of the kinds that a rule takes.
    """
    if isinstance(match, (list, tuple)):
        chosen = {name for part in match for name in select(part, modules)}
        return [name for name in modules if name in chosen]
    if isinstance(match, str) and not match.startswith("re:"):
        return [match] if match in modules else []
    if isinstance(match, (str, re.Pattern)):
        pattern = re.compile(match[3:]) if isinstance(match, str) else match
        return [name for name in modules if pattern.fullmatch(name)]
    if isinstance(match, type):
        return [name for name, module in modules.items() if isinstance(module, match)]
    if callable(match):
        return [name for name, module in modules.items() if match(name, module)]
    raise ParallelismTypeError(
        "A rule matches by a module name, 're:...', a compiled pattern, a module type, a callable "
        f"(name, module) -> bool, or a list of these, not by {type(match).__name__}."
    )


def merge_rules(
    rules: tuple[Rule, ...], modules: Mapping[str, nn.Module], containers: str
) -> dict[str, dict[str, tuple[Any, str]]]:
    """Module name to the fields that the rules set there, later rules winning field by field.

    A ModuleList or ModuleDict stands for its children (or, with `containers="skip"`, for nothing).

    Raises:
        ParallelismValueError: rules that match nothing and are not optional; all of them at once.
    """
    merged: dict[str, dict[str, tuple[Any, str]]] = {}
    unmatched: list[str] = []
    for rule in rules:
        names = select(rule.match, modules)
        if not names and not rule.optional:
            hint = near_miss(rule.match, list(modules)) if isinstance(rule.match, str) else ""
            unmatched.append(f"{spell(rule.match)}.{hint}")
        for name in _expand(names, modules, containers):
            for item in fields(rule):
                value = getattr(rule, item.name)
                if item.name not in {"match", "optional"} and value is not None:
                    merged.setdefault(name, {})[item.name] = (value, f"rule {spell(rule.match)}")
    if unmatched:
        raise ParallelismValueError(
            "No module matches "
            + " No module matches ".join(unmatched)
            + " (Rule(..., optional=True) allows that.)"
        )
    return merged


def spell(match: Match) -> str:
    """A rule's `match` as its author would write it."""
    if isinstance(match, (list, tuple)):
        return "[" + ", ".join(spell(part) for part in match) + "]"
    if isinstance(match, re.Pattern):
        return repr(f"re:{match.pattern}")
    return repr(match) if isinstance(match, str) else getattr(match, "__qualname__", repr(match))


def choose_units(
    structure: Structure,
    config: ParallelismConfig,
    policy: WrapPolicy | None = None,
    children: tuple[str, ...] = (),
) -> Choices:
    """Decide for every module of a model whether it is a unit, and by whose word.

    Args:
        policy: the caller's `fsdp_wrap_policy`.
        children: modules that are units unless somebody says no (the children of a ComposerModel).

    Raises:
        ParallelismValueError: a rule that matches nothing, a policy or attributes that choose no unit.
        ParallelismKeyError: a policy's dictionary with a key that is not an option of `fully_shard`.
        ParallelismTypeError: a policy that returns neither a bool nor a dictionary.
    """
    modules = structure.modules
    rules = merge_rules(tuple(config.rules), modules, config.containers)
    chosen: dict[str, Choice] = {}
    plain: dict[str, str] = {}
    by_rule = by_function = False
    seen: set[int] = set()
    for name, module in modules.items():
        shard, source = rules.get(name, {}).get("shard", (None, ""))
        if shard is False:
            plain[name] = f"{source} leaves it replicated"
        if shard is False or id(module) in seen:
            continue
        seen.add(id(module))
        if shard:
            chosen[name], by_rule = Choice(True, source), True
        elif (choice := _ask(name, module, modules, policy)) is not None:
            chosen[name] = choice
            by_function |= policy is not None or "_fsdp_wrap" not in choice.reason
        elif name in children:
            chosen[name] = Choice(True, "direct child of the ComposerModel")
    chosen = dict(_expand_choices(chosen, modules, config.containers))
    if by_function and not any(choice.unit for choice in chosen.values()):
        raise ParallelismValueError(
            "Nothing would be sharded: the wrap policy (fsdp_wrap_policy or fsdp_wrap_fn) chooses no "
            "module. Return True for at least one, or leave the policy out."
        )
    if not any(choice.unit for name, choice in chosen.items() if name not in children):
        for name, reason in structural_units(modules):
            chosen.setdefault(name, Choice(True, reason))
    root = chosen.pop("", None)
    if root is None or not root.unit:
        refused = by_rule or getattr(modules[""], "_fsdp_wrap", None) is False or "" in plain
        root = None if refused else Choice(True, "the root takes the rest")
    return Choices(chosen, plain, rules, root)


def structural_units(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, str]]:
    """The repeated blocks of a model, outermost ones, each with the reason.

    A block is a child of a ModuleList, ModuleDict or Sequential that is of a class which Hugging Face
    lists in `_no_split_modules`, or which has a sibling of its own class. A block has children of its
    own: a list of bare layers may be indexed for their weights rather than called. Only where a model
    has no such block do the layers of a Sequential, which are always called, count.
    """
    no_split: set[str] = set()
    for module in modules.values():
        no_split.update(getattr(module, "_no_split_modules", None) or ())
    found = list(_blocks("", modules, no_split, leaves=False))
    yield from found or _blocks("", modules, no_split, leaves=True)


def _blocks(
    name: str, modules: Mapping[str, nn.Module], no_split: set[str], leaves: bool
) -> Iterator[tuple[str, str]]:
    module = modules[name]
    for key, child in module._modules.items():
        path = f"{name}.{key}" if name else key
        if child is None or path not in modules:
            continue
        kind = type(child).__name__
        if isinstance(module, _CONTAINERS) and has_forward(child) and _holds_parameters(child):
            siblings = sum(type(other) is type(child) for other in module._modules.values())
            block = any(True for _ in child.children())
            if kind in no_split:
                yield path, f"{kind} is one of the model's _no_split_modules"
                continue
            inner = any(type(below).__name__ in no_split for below in child.modules())
            if (
                siblings > 1
                and not inner
                and (block or (leaves and isinstance(module, nn.Sequential)))
            ):
                yield path, f"one of {siblings} {kind} in {name or 'the root'}"
                continue
        yield from _blocks(path, modules, no_split, leaves)


def inherited(name: str, modules: Mapping[str, nn.Module], attribute: str) -> Any:
    """`attribute` of the module called `name` or of its nearest ancestor that has it, else None."""
    path = name.split(".") if name else []
    for end in range(len(path), -1, -1):
        value = getattr(modules.get(".".join(path[:end])), attribute, None)
        if value is not None:
            return value
    return None


def _ask(
    name: str, module: nn.Module, modules: Mapping[str, nn.Module], policy: WrapPolicy | None
) -> Choice | None:
    """The opinion of the caller's policy, else of the attributes, about one module."""
    if policy is not None:
        function = policy._lambda_fn if isinstance(policy, CustomPolicy) else policy
        return _read_answer(function(module), name, "fsdp_wrap_policy")
    own = getattr(module, "_fsdp_wrap", None)
    if own is not None:
        return Choice(bool(own), f"_fsdp_wrap={bool(own)}")
    function = inherited(name, modules, "fsdp_wrap_fn")
    return None if function is None else _read_answer(function(module), name, "fsdp_wrap_fn")


def _read_answer(answer: Any, name: str, source: str) -> Choice:
    if not isinstance(answer, (bool, dict)):
        raise ParallelismTypeError(
            f"{source} must return True, False or a dictionary of options, but returned "
            f"{type(answer).__name__} for module {name!r}."
        )
    options = dict(answer) if isinstance(answer, dict) else {}
    unknown = sorted(set(options) - set(_OPTION_TYPES))
    if unknown:
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
    return Choice(bool(answer), source, {k: v for k, v in options.items() if v is not None})


def _expand(names: list[str], modules: Mapping[str, nn.Module], containers: str) -> Iterator[str]:
    """Names with every bare container replaced by its children, or dropped."""
    for name in names:
        module = modules[name]
        if has_forward(module) or not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            yield name
        elif containers == "expand":
            inner = [f"{name}.{key}" for key, child in module._modules.items() if child is not None]
            yield from _expand(inner, modules, containers)


def _expand_choices(
    chosen: Mapping[str, Choice], modules: Mapping[str, nn.Module], containers: str
) -> Iterator[tuple[str, Choice]]:
    for name, choice in chosen.items():
        if has_forward(modules[name]) or not choice.unit:
            yield name, choice
            continue
        warnings.warn(
            f"{name} is a {type(modules[name]).__name__}, which has no forward of its own; "
            + ("its children are units instead." if containers == "expand" else "it is skipped."),
            UserWarning,
            stacklevel=2,
        )
        for inner in _expand([name], modules, containers):
            if inner not in chosen:
                yield inner, Choice(True, f"{choice.reason}, through {name}", choice.options)


def _holds_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def composer_children(model: nn.Module) -> tuple[str, ...]:
    """The names of a ComposerModel's direct children that are units: all but its metrics.

    Raises:
        ParallelismTypeError: not a ComposerModel.
    """
    from composer_dist.models.base import ComposerModel

    if not isinstance(model, ComposerModel):
        raise ParallelismTypeError(
            f"parallelize_composer_model prepares a ComposerModel, not a {type(model).__name__}; "
            "parallelize_model prepares any module."
        )
    return tuple(name for name, child in model.named_children() if _holds_parameters(child))


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 manages `module` as a unit already."""
    return isinstance(module, FSDPModule)
