"""What the caller of `parallelize_model` asks for: a `Request`, and its `Wishes` for one model.

Once the plan is made, which holds every decision, only objects are taken from a request: the optimizers, the
path of the weights and the initializer.
"""

import inspect
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any, Self

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from composer_dist._torch import CustomPolicy
from composer_dist.config import presets as presets
from composer_dist.config.mesh import MeshConfig
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.config.parallelism import register_strategy as register_strategy
from composer_dist.config.parallelism import resolve_config as resolve_config
from composer_dist.config.rule import Rule
from composer_dist.distributed.ranks import process_group
from composer_dist.errors import Faults, ParallelismTypeError, ParallelismValueError
from composer_dist.precision import Precision
from composer_dist.structure.blocks import has_forward
from composer_dist.structure.select import children_of, container_text, neighbor, parts_of, select, spell
from composer_dist.structure.structure import Structure
from composer_dist.tensors.codec import register_tensor_codec as register_tensor_codec
from composer_dist.wording import HINTS, listed, near_miss

WrapPolicy = CustomPolicy | Callable[[nn.Module], bool | dict[str, Any]]
CheckFn = Callable[[nn.Module], bool]
UNIT_FIELDS = ("reshard_after_forward", "mixed_precision", "offload")
"""The fields of a rule that only a unit can follow."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Everything that one call asks for; see `parallelize_model`."""

    config: ParallelismConfig
    """As `resolve_config` returns it, without aliases."""
    precision: str | Precision | None = None
    wrap_policy: WrapPolicy | None = None
    check_fn: CheckFn | None = None
    children: tuple[str, ...] = ()
    """Modules that are units by default: the children of a ComposerModel."""
    optimizers: tuple[Optimizer, ...] = ()
    weights: str | os.PathLike[str] | None = None
    init_fn: Callable[[nn.Module], None] | None = None

    def __post_init__(self) -> None:
        for name, function in (
            ("fsdp_wrap_policy", self.wrap_policy),
            ("activation_checkpointing_check_fn", self.check_fn),
            ("param_init_fn", self.init_fn),
        ):
            if not (function is None or isinstance(function, CustomPolicy)):
                check_function(name, function)

    @property
    def device_type(self) -> str:
        """The kind of device that the mesh is on: the one asked for, or the process group's."""
        return self.mesh.device_type or process_group.device_of_group().type

    @property
    def mesh(self) -> MeshConfig | DeviceMesh:
        """The sizes of the mesh, or a mesh of the caller's own."""
        assert self.config.mesh is not None, "resolve_config sets it"
        return self.config.mesh


def check_function(name: str, function: object) -> None:
    """Refuse what cannot be called with a module alone, such as classes of modules and FSDP1's policies."""
    remedy = "To choose modules of a class, pass lambda module: isinstance(module, TheClass)."
    remedy = "" if name == "param_init_fn" else f" {remedy}"
    if not callable(function) or (isinstance(function, type) and issubclass(function, nn.Module)):
        raise ParallelismTypeError(f"{name} must be a function of a module, not {function!r}.{remedy}")
    with suppress(ValueError):  # it is written in C
        signature = inspect.signature(function)
        try:
            signature.bind(None)
        except TypeError as error:
            kind = getattr(getattr(function, "func", function), "__name__", type(function).__name__)
            raise ParallelismTypeError(
                f"{name} is called with a module alone, but {kind} takes other arguments: {error}.{remedy}"
            ) from None


@dataclass(frozen=True, kw_only=True)
class Wishes(Request):
    """A request for one model, with its rules applied to the modules."""

    rules: Mapping[str, Mapping[str, tuple[Any, str]]] = field(default_factory=dict)
    """Module name to the fields that rules set there, each with its value and the rule's spelling."""
    warnings: tuple[str, ...] = ()

    @classmethod
    def read(cls, request: Request, structure: Structure) -> Self:
        """The wishes of `request` for the model of this structure; see `merge_rules` for errors."""
        config = request.config
        rules, warnings = merge_rules(config.rules, structure, config.containers)
        return cls(**vars(request), rules=rules, warnings=tuple(warnings))

    def tolerated(self, idle: Sequence[str]) -> list[str]:
        """Warnings about wishes without effect, which a strict configuration refuses."""
        if idle and self.config.strict:
            raise ParallelismValueError("\n".join(idle))
        return list(idle)

    def ruled(self, key: str) -> dict[str, tuple[Any, str]]:
        """Module name to value and source of the rules' field `key`, where a rule sets it."""
        return {name: given[key] for name, given in self.rules.items() if key in given}

    def idle_exclusions(
        self, key: str, option: str, default: Sequence[str], chosen: Collection[str]
    ) -> Iterator[str]:
        """Errors about rules that set `key` to False for nothing, or for everything that `option` chooses.

        Args:
            default: the modules that `option` chooses without rules; none if it is off.
            chosen: the modules that are chosen, by `option` or by rule.
        """
        excluded: dict[str, set[str]] = {}
        for name, (value, source) in self.ruled(key).items():
            if value is False:
                excluded.setdefault(source, set()).add(name)
        choice = listed([name or "root" for name in default], 3)
        for source, names in excluded.items():
            if names.isdisjoint(default):
                why = f"{option} chooses {choice}" if default else f"{option} is off"
                yield f"{source} sets {key}=False, but excludes nothing: {why}; leave it out."
        if default and not chosen:
            yield (
                f"{option} has no effect, because {', '.join(excluded)} sets {key}=False for all that it "
                f"chooses ({choice}); leave one of them out."
            )


def merge_rules(
    rules: Sequence[Rule], structure: Structure, containers: str
) -> tuple[dict[str, dict[str, tuple[Any, str]]], list[str]]:
    """Module name to the fields that the rules set there; later rules override earlier ones by field.

    A ModuleList or ModuleDict represents its children, or nothing with `containers="skip"`; the second result
    has a warning for each. What the rules say for any name of a module is said for the module.

    Raises:
        ParallelismValueError: a rule matches or sets nothing, or rules contradict each other about one module
            under two names.
    """
    modules = structure.modules
    merged: dict[str, dict[str, tuple[Any, str]]] = {}
    said: dict[str, dict[str, tuple[Any, str]]] = {}  # as `merged`, by every name of a module
    warnings: dict[str, None] = {}
    keys = [one.name for one in fields(Rule) if one.name not in {"match", "optional"}]
    with Faults() as faults:
        for rule in rules:
            parts = [(part, select(part, modules)) for part in parts_of(rule.match)]
            names = parts[0][1]
            if len(parts) > 1:
                chosen = {name for _, some in parts for name in some}
                names = [name for name in modules if name in chosen]
            for part, some in parts:
                if not some and not rule.optional:
                    hint = neighbor(part, modules) if len(faults) < HINTS else ""
                    faults.append(
                        f"No module matches {spell(part)}.{hint} (Rule(..., optional=True) allows that.)"
                    )
            source = f"rule {spell(rule.match)}"
            given = {key: (getattr(rule, key), source) for key in keys if getattr(rule, key) is not None}
            if not given:
                faults.append(f"The {source} sets nothing; give it one of {', '.join(keys)}.")
            for name in names:
                inner = [name]
                module = modules[name]
                if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and not has_forward(module):
                    inner = children_of(name, structure)
                    if not set(inner) <= set(names):
                        warnings[container_text(name, module, containers)] = None
                    inner = inner if containers == "expand" else []
                for one in inner:
                    said.setdefault(one, {}).update(given)
                    merged.setdefault(structure.first[one], {}).update(given)
        faults += _contradictions(said, structure)
    return merged, list(warnings)


def _contradictions(said: Mapping[str, Mapping[str, tuple[Any, str]]], structure: Structure) -> Iterator[str]:
    heard: dict[tuple[str, str], tuple[Any, str, str]] = {}
    for name, given in said.items():
        for key, (value, source) in given.items():
            before, where, other = heard.setdefault((structure.first[name], key), (value, source, name))
            if before != value:
                yield (
                    f"{other} and {name} are one module, but the {where} sets {key}={before!r} and the "
                    f"{source} {key}={value!r}. Give all names of the module the same options, or use a "
                    "separate module in each place, with tied parameters if they should be the same."
                )


def check_forward_methods(names: Sequence[str], structure: Structure, units: Iterable[str]) -> None:
    """Raise a ParallelismValueError for names that are not a method of any unit."""
    modules = [structure.modules[unit] for unit in units]
    with Faults() as faults:
        for name in names:
            of_all = {other: getattr(type(m), name, None) for other, m in structure.modules.items()}
            having = [other for other, method in of_all.items() if callable(method)]
            if any(structure.modules[other] in modules for other in having):
                continue
            known = {key for module in modules for key in dir(type(module)) if key not in dir(nn.Module)}
            remedy = near_miss(name, known)
            if having:
                home = having[0] or "The root"
                remedy = f" {home} has it; make it a unit with Rule({having[0]!r}, shard=True)."
            faults.append(f"forward_methods: no unit has a method {name!r}.{remedy}")
