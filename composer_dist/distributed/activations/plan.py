"""The plan of activations: which modules recompute or offload them, and why."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from composer_dist.distributed.activations.options import Mode, ac_mode, mode_in_words
from composer_dist.distributed.feature_plan import FeaturePlan
from composer_dist.distributed.forwards import is_checkpointed
from composer_dist.distributed.moving.memory import pins
from composer_dist.distributed.wishes import CheckFn, Wishes
from composer_dist.errors import Faults, ParallelismValueError
from composer_dist.structure.blocks import has_forward
from composer_dist.structure.select import inherited
from composer_dist.structure.structure import Structure
from composer_dist.users_code import warn


@dataclass(frozen=True)
class Checkpointed:
    """A module that does not keep all activations on the device."""

    module: str
    mode: Mode
    reason: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def recomputes(self) -> bool:
        """Whether backward runs its forward again, under torch's checkpoint."""
        return self.mode in ("composable", "wrapped")


@dataclass(frozen=True)
class ActivationPlan(FeaturePlan):
    """The modules that do not keep all activations on the device."""

    modules: tuple[Checkpointed, ...]

    @property
    def budgets(self) -> dict[str, float]:
        """Modules with a memory budget for torch.compile, each with the budget."""
        return {one.module: one.options["budget"] for one in self.modules if one.mode == "memory_budget"}

    def explain(self, module: str) -> str:
        return " ".join(
            f"Its activations are {mode_in_words(one.mode, one.options)}, because {one.reason}."
            for one in self.modules
            if one.module == module
        )

    def notes(self) -> Iterator[str]:
        modes = sorted({one.mode for one in self.modules})
        yield f"activations of {len(self.modules)} modules: {', '.join(modes)}"


def plan(
    structure: Structure, wishes: Wishes, sizes: Mapping[str, int], blocks: Sequence[str]
) -> ActivationPlan | None:
    """Choose the modules: by rule, else by `check_fn` or attributes, else `blocks`, the model's blocks."""
    modules, strict = structure.modules, wishes.config.strict
    by_rule = wishes.ruled("act_ckpt")
    chosen = {one.module: one for one in _by_rule(by_rule, modules, strict)}
    mode = ac_mode(wishes.config.activation_checkpointing, strict=strict)
    names: Sequence[str] = ()
    if mode is not None:
        names, reason = _by_default(modules[""], wishes.check_fn, blocks, strict)
        for one in _take(names, *mode, reason):
            if one.module not in by_rule:
                chosen[one.module] = one
    elif wishes.check_fn is not None:
        raise ParallelismValueError(
            "activation_checkpointing_check_fn has no effect: activation checkpointing or offloading "
            "must be enabled for it. Set activation_checkpointing, or leave the function out."
        )
    with Faults() as faults:
        faults += wishes.idle_exclusions("act_ckpt", "activation_checkpointing", names, chosen)
    for kind in dict.fromkeys(one.mode for one in chosen.values()):
        check_modules(modules, [name for name, one in chosen.items() if one.mode == kind], kind)
    return ActivationPlan(tuple(_pinned(one, wishes) for one in chosen.values())) if chosen else None


def _pinned(one: Checkpointed, wishes: Wishes) -> Checkpointed:
    """The same with a decision about pinned memory, if it offloads."""
    if one.mode != "offload" and not one.options.get("offload"):
        return one
    pinned = pins(one.options.get("pin_memory"), wishes.device_type)
    return replace(one, options={**one.options, "pin_memory": pinned})


def _by_default(
    model: nn.Module, check_fn: CheckFn | None, blocks: Sequence[str], strict: bool
) -> tuple[list[str], str]:
    """The modules that are chosen without rules, and the reason."""
    names = checkpointed_modules(model, check_fn)
    reason = "activation_checkpointing_check_fn" if check_fn else "an attribute of the model asks for it"
    if not names and check_fn is None:
        names, reason = list(blocks), "it is a block"
    if not names:
        why = "activation_checkpointing_check_fn chooses no module" if check_fn else "no module is marked"
        message = (
            f"activation_checkpointing is on, but {why}. Mark modules with _activation_checkpointing, or "
            "pass another check function."
        )
        if strict:
            raise ParallelismValueError(message)
        warn(message)
    return names, reason


def _by_rule(
    rules: Mapping[str, tuple[Any, str]], modules: Mapping[str, nn.Module], strict: bool
) -> Iterator[Checkpointed]:
    together: dict[tuple[str, str], list[str]] = {}
    for name in filter(rules.__contains__, modules):
        value, source = rules[name]
        together.setdefault((source, repr(value)), []).append(name)
    for (source, _), names in together.items():
        mode = ac_mode(rules[names[0]][0], strict=strict)
        if mode is not None:
            yield from _take(names, *mode, source)


def _take(
    names: Sequence[str], mode: Mode, options: Mapping[str, Any], reason: str
) -> Iterator[Checkpointed]:
    """All modules, or every n-th, starting with the first.

    This leaves out the last block, whose backward runs first, so that recomputing it would save no memory.
    """
    options = dict(options)
    every = options.pop("every", 1)
    if every > 1:
        reason = f"{reason}, the first of every {every}"
    for name in names[::every]:
        yield Checkpointed(name, mode, reason, options)


def checkpointed_modules(model: nn.Module, check_fn: CheckFn | None = None) -> list[str]:
    """The names of the modules to checkpoint, in the order of the model, without the root.

    If `check_fn` is given, it decides. Otherwise a module's own `_activation_checkpointing` does, or else the
    `activation_checkpointing_fn` of the module or its nearest ancestor. A container without a forward of its
    own (a ModuleList) represents its children.
    """
    modules = dict(model.named_modules())
    functions = inherited(modules, "activation_checkpointing_fn")
    chosen: list[str] = []
    through: set[str] = set()
    for name, module in modules.items():
        asked = name in through or _wants_checkpoint(module, check_fn, functions[name])
        if name and asked and has_forward(module):
            chosen.append(name)
        elif name and asked:
            through.update(f"{name}.{key}" for key, _ in module.named_children())
    return chosen


def _wants_checkpoint(module: nn.Module, check_fn: CheckFn | None, function: CheckFn | None) -> bool:
    if check_fn is not None:
        return bool(check_fn(module))
    own = getattr(module, "_activation_checkpointing", None)
    if own is not None:
        return bool(own)
    return function is not None and bool(function(module))


def check_modules(modules: Mapping[str, nn.Module], names: Sequence[str], mode: Mode) -> None:
    """Refuse modules whose activations cannot be checkpointed."""
    with Faults("Cannot checkpoint activations: ", ".", "; ") as faults:
        faults += [f"there is no module {name!r}" for name in names if name not in modules]
        if mode == "wrapped" and "" in names:
            faults.append("the root cannot be wrapped, because no module contains it (use 'composable')")
        for name in filter(modules.__contains__, names):
            if not has_forward(modules[name]):
                faults.append(f"{name!r} has no forward of its own (choose the modules in it)")
            elif mode != "offload" and is_checkpointed(modules[name]):
                faults.append(f"{name!r} is checkpointed already")
