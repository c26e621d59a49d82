"""The plan of torch.compile: which modules it compiles, and with which options."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from composer_dist import _torch
from composer_dist.config.base import Compile
from composer_dist.distributed.feature_plan import FeaturePlan
from composer_dist.distributed.forwards import is_compiled
from composer_dist.distributed.wishes import Wishes
from composer_dist.errors import Faults, ParallelismTypeError, ParallelismValueError
from composer_dist.precision import Precision, as_precision
from composer_dist.structure.blocks import has_forward
from composer_dist.structure.names import ancestors
from composer_dist.structure.structure import Structure
from composer_dist.wording import listed, near_miss

_KEYS = ("backend", "mode", "dynamic", "fullgraph", "options")
_AS_TRACED = ("eager", "eager_debug", "eager_noexcept", "pre_dispatch_eager", "ts")
"""Backends that run Dynamo's graphs, in which a recomputation draws other random numbers (torch 2.13)."""
_MIN_CUT = ("inductor", "aot_eager", "aot_eager_decomp_partition")
"""Backends with the partitioner that supports a memory budget."""
_MULTIPLE = 16
"""Both dimensions of a weight must be multiples of this for scaled products (torch._scaled_mm)."""


@dataclass(frozen=True)
class Compiled:
    """One module whose forward is compiled."""

    module: str
    reason: str
    options: Mapping[str, Any]
    """Of torch.compile; always include the backend."""
    budget: float | None = None
    """Share of the activations that may be kept, by `act_ckpt="memory_budget"`."""


def compile_options(value: Compile) -> dict[str, Any] | None:
    """The options of torch.compile that a user's value for `compile` stands for; None compiles nothing."""
    if value is None or value is False:
        return None
    if value is not True and not isinstance(value, Mapping):
        raise ParallelismTypeError(f"compile must be a bool or a mapping of options, not {value!r}.")
    options = {"backend": "inductor", **({} if value is True else value)}
    with Faults("compile ", ".", "; ") as faults:
        faults += _option_faults(options)
    return {key: given for key, given in options.items() if given is not None}


def _option_faults(options: Mapping[str, Any]) -> Iterator[str]:
    for key in options:
        if key not in _KEYS:
            hint = near_miss(str(key), _KEYS)
            yield f"has no option {key!r}; valid options: {', '.join(_KEYS)}.{hint}".rstrip(".")
    for key in ("dynamic", "fullgraph"):
        if options.get(key) not in (None, True, False):
            yield f"needs {key} to be True or False, not {options[key]!r}"
    backend, mode, inner = options["backend"], options.get("mode"), options.get("options")
    backends = torch.compiler.list_backends(exclude_tags=())
    if backend not in backends:
        yield f"has no backend {backend!r} here; valid backends: {', '.join(backends)}"
    elif backend != "inductor" and not (mode is None and inner is None):
        yield f"supports mode and options only with backend 'inductor', not {backend!r}; leave them out"
    elif mode is not None and inner is not None:
        yield "accepts mode or options, not both; leave one out"
    elif mode is not None and mode not in _torch.inductor_modes():
        yield f"has no mode {mode!r}; valid modes: {', '.join(_torch.inductor_modes())}"
    elif inner is not None and not isinstance(inner, Mapping):
        yield f"needs options to be a mapping of inductor's options, not {inner!r}"
    elif inner is not None:
        known = _torch.inductor_options()
        for key in inner:
            if str(key).replace("-", "_") not in known:
                yield f"has no inductor option {key!r}.{near_miss(str(key), known)}".rstrip(".")


@dataclass(frozen=True)
class Surroundings:
    """Other plans for the modules, which limit what can be compiled."""

    units: Sequence[str] = ()
    """Modules that FSDP2 gathers."""
    recomputed: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Modules that are recomputed, each with its options."""
    budgets: Mapping[str, float] = field(default_factory=dict)
    """Modules with a memory budget for their activations."""
    divided: Sequence[str] = ()
    """Modules with collectives of tensor parallelism."""
    cp: int = 1
    """The number of ranks that share a sequence."""


@dataclass(frozen=True)
class CompilePlan(FeaturePlan):
    """The modules that are compiled, and those that compute in float8."""

    modules: tuple[Compiled, ...] = ()
    """Modules with a compiled forward."""
    float8: tuple[str, ...] = ()
    """Linear layers that compute in float8."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about slow combinations."""
        slow = "float8 without torch.compile is slower than amp_bf16; set compile=True."
        return (slow,) if self.float8 and not self.modules else ()

    def explain(self, module: str) -> str:
        texts = ["It computes in float8, because precision is amp_fp8."] if module in self.float8 else []
        for one in self.modules:
            if one.module == module:
                options = ", ".join(f"{key}={value}" for key, value in one.options.items())
                texts.append(f"Its forward is compiled ({options}), because {one.reason}.")
        return " ".join(texts)

    def notes(self) -> Iterator[str]:
        if self.modules:
            backends = sorted({one.options["backend"] for one in self.modules})
            yield f"compiled: {len(self.modules)} modules, each separately ({', '.join(backends)})"
        if self.float8:
            yield f"float8: {len(self.float8)} linear layers"


def plan(
    structure: Structure,
    wishes: Wishes,
    sizes: Mapping[str, int],
    blocks: Sequence[str],
    around: Surroundings,
) -> CompilePlan | None:
    """Choose the modules: by rule, else `blocks`, the model's blocks, else the whole model."""
    modules, by_rule = structure.modules, wishes.ruled("compile")
    general = compile_options(wishes.config.compile)
    default, reason = blocks, "it is a block"
    if not blocks and not any(value for value, _ in by_rule.values()):
        default, reason = [""], "the model has no repeated block"
    chosen: dict[str, Compiled] = {}
    for name in modules:
        value, source = by_rule.get(name, (general is not None and name in default, reason))
        options = general if value is True and general is not None else compile_options(value)
        if options is not None:
            chosen[name] = Compiled(name, source, options, around.budgets.get(name))
    clashes: dict[str, list[str]] = {}
    for name, one in chosen.items():
        for text in _clashes(modules[name], one, around):
            clashes.setdefault(text, []).append(name)
    with Faults() as faults:
        chooses = default if general is not None else ()
        faults += wishes.idle_exclusions("compile", "compile", chooses, chosen)
        faults += _idle_budgets(chosen, around.budgets)
        faults += [f"Cannot compile {listed(names, 3)}: {text}" for text, names in clashes.items()]
    found = CompilePlan(tuple(chosen.values()), _float8_layers(structure, blocks, wishes.precision))
    return found if found.modules or found.float8 else None


def _idle_budgets(chosen: Mapping[str, Compiled], budgets: Mapping[str, float]) -> Iterator[str]:
    uncompiled = [name for name in budgets if name not in chosen]
    if uncompiled:
        yield (
            f"The memory budget of {listed(uncompiled, 3)} is for torch.compile, which is off there; set "
            "compile=True, or choose another mode of activation checkpointing."
        )


def _clashes(module: nn.Module, one: Compiled, around: Surroundings) -> Iterator[str]:
    name, backend, cp = one.module, one.options["backend"], around.cp
    inside = [options for other, options in around.recomputed.items() if name in ancestors(other)]
    above = [other for other in ancestors(name) if other != name]
    outside = [options for other, options in around.recomputed.items() if other in above]
    if not has_forward(module):
        yield "it has no forward; choose the modules inside."
    if is_compiled(module):
        yield "it is compiled already; let preparation compile it, or set Rule(..., compile=False)."
    whole_graph = {"activation checkpointing": inside, "fullgraph=True": one.options.get("fullgraph")}
    for other in (text for text, wanted in whole_graph.items() if wanted):
        if any(unit != name and name in ancestors(unit) for unit in around.units):
            yield (
                f"units inside gather their parameters between two graphs, which {other} does not support; "
                f"compile those units instead (Rule(..., compile=True)), or leave {other} out."
            )
        if cp > 1:
            yield (
                f"context parallelism (cp={cp}) breaks the graph at attention, which {other} does not "
                f"support; leave {other} out, or do not compile."
            )
    if inside and backend in _AS_TRACED:
        yield (
            f"backend {backend!r} recomputes activations with other random numbers (dropout); use "
            "'aot_eager' or 'inductor', or no activation checkpointing."
        )
    if any({"save", "offload"} <= options.keys() for options in inside):
        yield "activation checkpointing cannot offload saved results here; leave out save, or offload."
    if any("save" in options for options in outside):
        yield (
            "activation checkpointing of an outer module saves the results of single operations, and a "
            "compiled module is a single operation; compile and checkpoint the same module."
        )
    repeats = one.budget is not None or any("default" not in options.get("save", ()) for options in inside)
    if repeats and any(name in ancestors(other) for other in around.divided):
        yield (
            "torch.compile cannot recompute the collectives of tensor parallelism (torch 2.13); keep their "
            "results with activation_checkpointing='selective', or leave it out."
        )
    if one.budget is not None and backend not in _MIN_CUT:
        yield f"backend {backend!r} does not support a memory budget; {', '.join(_MIN_CUT)} do."


def _float8_layers(
    structure: Structure, blocks: Sequence[str], precision: str | Precision | None
) -> tuple[str, ...]:
    """The linear layers in the blocks whose sizes support float8.

    As in float8 recipes, layers outside the blocks, such as embeddings and heads, are not converted.
    """
    if as_precision(precision) is not Precision.AMP_FP8:
        return ()
    names = tuple(
        name
        for name, module in structure.modules.items()
        if structure.first[name] == name and _fits(module) and not set(blocks).isdisjoint(ancestors(name))
    )
    if not names:
        raise ParallelismValueError(
            "precision='amp_fp8' finds no layer to compute in float8: it converts each nn.Linear in the "
            f"model's blocks whose sizes are multiples of {_MULTIPLE}. Use 'amp_bf16'."
        )
    return names


def _fits(module: nn.Module) -> bool:
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False  # another forward would be lost
    return module.in_features % _MULTIPLE == 0 and module.out_features % _MULTIPLE == 0
