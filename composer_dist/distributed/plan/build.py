"""Whether the tensors that have codecs can be sharded as planned; asked before anything is touched.

MERGED: Making the plan, before anything is touched.

`plan_parallelism` reads a model (real or on the meta device) and a configuration and returns a
`ParallelPlan`: pure data, built without a process group, for any world size. `parallelize_model`
builds the same object and executes it, so what the plan says is what happens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.config.replicate import DDPConfig
from composer_dist.config.resolve import resolve_config
from composer_dist.distributed.activations.plan import plan_checkpointing
from composer_dist.distributed.compiling.float8 import plan_float8
from composer_dist.distributed.compiling.plan import plan_compile
from composer_dist.distributed.context_parallelism.check import check_context
from composer_dist.distributed.mesh.build import mesh_sizes, own_mesh
from composer_dist.distributed.optimizers.check import check_optimizers
from composer_dist.distributed.plan.plan import ModulePlan, ParallelPlan
from composer_dist.distributed.prepared import check_module
from composer_dist.distributed.replication.plan import check_unprepared, replicate_all
from composer_dist.distributed.sharding.choose import Choices, WrapPolicy, choose_units, composer_children
from composer_dist.distributed.sharding.hooks import check_forward_methods
from composer_dist.distributed.sharding.plan import Unit, idle_rules, plan_unit, with_tensor_parallel
from composer_dist.distributed.sharding.skip import plan_skippable
from composer_dist.distributed.sharding.units import Assignment, assign
from composer_dist.distributed.tensor_parallel.plan import idle_styles, plan_tensor_parallel
from composer_dist.distributed.weights.initialize import Component, find_components, peak_bytes
from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.precision import Precision
from composer_dist.structure.blocks import structural_units
from composer_dist.structure.families import architecture_of
from composer_dist.structure.names import ancestors
from composer_dist.structure.shared import check_duplicates
from composer_dist.structure.structure import Held, Structure, read_structure
from composer_dist.tensors.inner import codec_of, empty_like, inner_tensors
from composer_dist.wording import kind_in_words

_UNCUT = "cannot go with tensor parallelism, which cuts plain tensors. Use tp=1."


def check_codecs(
    structure: Structure, units: Sequence[Unit], sizes: Mapping[str, int], cut: Collection[str] = ()
) -> None:
    """Refuse parameters whose class, or whose codec, cannot follow the plan.

    Args:
        sizes: mesh dimension to size.
        cut: names of the parameters that tensor parallelism cuts.

    Raises:
        ParallelismValueError: names the parameters, all of them at once, each with the first reason.
    """
    faults = [
        f"{name}, a {type(structure.tensors[name].get()).__name__}, {_UNCUT}"
        for name in cut
        if structure.tensors[name].info.inner
    ]
    for unit in units:
        for name in unit.parameters:
            held = structure.tensors[name]
            if held.info.inner and name not in cut and (fault := next(_faults(held, unit, sizes), None)):
                faults.append(
                    f"{name}, a {type(held.get()).__name__}, {fault} Or leave its module replicated with "
                    "Rule(..., shard=False)."
                )
    if faults:
        raise ParallelismValueError("\n".join(faults))


def _faults(held: Held, unit: Unit, sizes: Mapping[str, int]) -> Iterator[str]:
    tensor, info = held.get(), held.info
    codec = codec_of(tensor)
    assert codec is not None
    if unknown := sorted(codec.rows - {inner.name for inner in info.inner}):
        yield f"has no inner tensors {', '.join(unknown)}, which its codec lists in rows. Correct rows."
    if nested := [n for n, inner in inner_tensors(tensor).items() if type(inner) is not torch.Tensor]:
        yield f"is made of other subclasses ({', '.join(nested)}). Let flatten take these apart as well."
    if info.requires_grad:
        yield "is trained, but a codec is for frozen ones. Freeze it (requires_grad=False)."
    if not all(hasattr(tensor, f"fsdp_{when}_all_gather") for when in ("pre", "post")):
        yield (
            "cannot be gathered: its class lacks fsdp_pre_all_gather and fsdp_post_all_gather. Write them "
            "(https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html)."
        )
    if not isinstance(unit.reshard_after_forward, bool):
        yield (
            f"cannot be resharded to {unit.reshard_after_forward} ranks; FSDP2 does that to plain tensors "
            "only. Set reshard_after_forward to True or False."
        )
    if sizes["tp"] > 1:
        yield _UNCUT
    shards = sizes["dp_shard"] * sizes["cp"]
    rows = {"it": info.shape[0]} | {inner.name: (*inner.shape, 1)[0] for inner in info.inner if inner.rows}
    if uneven := [f"{name} has {count}" for name, count in rows.items() if count % shards]:
        yield (
            f"of shape {info.shape}, cannot be cut among {shards} ranks in equal parts of rows: "
            f"{', '.join(uneven)}. Choose another dp_shard."
        )
    part = empty_like(tensor, "meta", shards)
    shape = (info.shape[0] // shards, *info.shape[1:])
    if type(part) is not type(tensor) or part.shape != shape:
        yield (
            f"becomes a {type(part).__name__} of shape {tuple(part.shape)} when its codec is asked for shape "
            f"{shape}. Let unflatten heed the shape."
        )


Config = FSDP2Config | DDPConfig | ParallelismConfig | Mapping[str, Any] | str


def plan_parallelism(
    model: nn.Module,
    config: Config,
    *,
    world_size: int | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    precision: str | Precision | None = None,
    fsdp_wrap_policy: WrapPolicy | None = None,
    activation_checkpointing_check_fn: Callable[[nn.Module], bool] | None = None,
    composer: bool = False,
) -> ParallelPlan:
    """Plan how `model` is made parallel, without changing it and without a process group.

    Args:
        model: real, or on the meta device.
        config: as for `parallelize_model`.
        world_size: ranks to plan for; None takes the process group's, or 1.
        optimizer: checked against the plan if given.
        precision: see `composer_dist.precision`.
        fsdp_wrap_policy: `module -> bool | dict of options`, or a `CustomPolicy`.
        activation_checkpointing_check_fn: `module -> bool`, the modules to checkpoint.
        composer: plan as `parallelize_composer_model` and the Trainer prepare a `ComposerModel`.

    Raises:
        ParallelismError: everything that can be known beforehand; see the errors of the steps.
    """
    check_module(model)
    config = resolve_config(config)
    structure = read_structure(model)
    plan = build_plan(
        structure,
        config,
        world_size=_world_size(config) if world_size is None else world_size,
        optimizers=as_tuple(optimizer),
        precision=precision,
        policy=fsdp_wrap_policy,
        check_fn=activation_checkpointing_check_fn,
        children=composer_children(model) if composer else (),
    )
    on_meta = {name for name, held in structure.tensors.items() if held.get().is_meta}
    components: list[Component] = []
    with suppress(ParallelismValueError):  # rank 0 may have what nothing here initializes
        components = find_components(structure, on_meta)
    return replace(plan, init_peak=peak_bytes(components, config.bucket_bytes))


def build_plan(
    structure: Structure,
    config: ParallelismConfig,
    *,
    world_size: int,
    optimizers: Sequence[Optimizer] = (),
    precision: str | Precision | None = None,
    policy: WrapPolicy | None = None,
    check_fn: Callable[[nn.Module], bool] | None = None,
    children: tuple[str, ...] = (),
) -> ParallelPlan:
    """`plan_parallelism` for a structure that has been read already."""
    sizes = mesh_sizes(config, world_size)
    check_duplicates(structure)
    check_unprepared(structure, replicating=config.ddp is not None)
    if sizes["cp"] > 1:
        check_context(structure, sizes["cp"])
    replica, shards = None, sizes["dp_shard"] * sizes["cp"]
    if config.ddp is None:
        choices = choose_units(structure, config, policy, children)
        assignment = assign(structure, choices, shards)
    else:
        choices, assignment, replica = replicate_all(structure, config, sizes, precision, policy)
    tensor_parallel = plan_tensor_parallel(structure, config, sizes["tp"], choices.rules)
    warnings = (*choices.warnings, *assignment.warnings, *idle_rules(choices, assignment, config.strict))
    warnings += tuple(idle_styles(config, sizes["tp"]))
    blocks = list(replica.blocks) if replica else _innermost(assignment)
    blocks = blocks or [name for name, _ in structural_units(structure)]
    last = blocks[-1] if blocks else None
    fsdp2 = config.fsdp2 or FSDP2Config()
    units = tuple(
        plan_unit(group, structure, fsdp2, shards, precision, group.modules == [last])
        for group in assignment.groups
    )
    called = [""] if replica else [n for u in units for n in u.modules]
    check_forward_methods(config.forward_methods, structure, called)
    if tensor_parallel is not None:
        assignment, units = with_tensor_parallel(
            assignment, units, tensor_parallel, structure, sizes, own_mesh(config)
        )
    cut = tensor_parallel.parameters if tensor_parallel else ()
    check_codecs(structure, units, sizes, cut)
    checkpointing = plan_checkpointing(structure.modules, config, check_fn, choices.rules, blocks)
    inner = [name for unit in units for name in unit.modules]
    divided = list(tensor_parallel.modules) if tensor_parallel else []
    compiled = plan_compile(
        structure.modules, config, choices.rules, blocks, inner, checkpointing, divided, sizes["cp"]
    )
    float8 = plan_float8(structure, blocks, precision)
    if float8 and not compiled:
        warnings = (*warnings, "float8 without torch.compile is slower than amp_bf16; set compile=True.")
    check_optimizers(optimizers, structure, assignment.plain)
    owner = {name: unit.name for unit in units for name in unit.parameters}
    return ParallelPlan(
        config=config,
        world_size=world_size,
        mesh=sizes,
        structure=structure.digest(),
        units=units,
        modules=dict(_module_plans(structure, choices, assignment)),
        plain=assignment.plain,
        ties=tuple(h.info.names for h in structure.parameters.values() if len(h.info.names) > 1),
        checkpointing=checkpointing,
        skippable=tuple(plan_skippable(structure, choices, assignment)),
        warnings=warnings,
        compiled=compiled,
        float8=float8,
        parameter_units=owner,
        tensor_parallel=tensor_parallel,
        others=dict(_others(structure, owner, assignment.plain)),
        replica=replica,
    )


def as_tuple(optimizer: Optimizer | Sequence[Optimizer] | None) -> tuple[Optimizer, ...]:
    """None, one or several optimizers as a tuple.

    Raises:
        ParallelismTypeError: none of these, such as the class of one.
    """
    if optimizer is None:
        return ()
    if isinstance(optimizer, (str, type)) or not isinstance(optimizer, Iterable):
        if isinstance(optimizer, Optimizer):
            return (optimizer,)
        raise ParallelismTypeError(
            f"optimizer must be an Optimizer, several of them, or None, not {kind_in_words(optimizer)}."
        )
    return tuple(optimizer)


def _world_size(config: ParallelismConfig) -> int:
    from composer_dist.distributed.ranks import process_group

    own = own_mesh(config)
    return own.size() if own is not None else process_group.world_and_rank()[0]


def _innermost(assignment: Assignment) -> list[str]:
    """The blocks of the model: units below the root that contain no other unit of their own kind."""
    names = [name for group in assignment.groups for name in group.modules if name and not group.split]
    outer = {above for name in names for above in ancestors(name) if above != name}
    return [name for name in names if name not in outer]


def _module_plans(
    structure: Structure, choices: Choices, assignment: Assignment
) -> Iterator[tuple[str, ModulePlan]]:
    units = {name: group for group in assignment.groups for name in group.modules}
    for name in structure.modules:
        first = structure.first[name]
        above = (structure.first[outer] for outer in ancestors(name))
        home = next((outer for outer in above if outer in units or outer in choices.plain), None)
        if first != name:
            yield name, ModulePlan("duplicate", _why_duplicate(first, structure))
        elif name in units:
            others = [other or "the root" for other in units[name].modules if other != name]
            joined = f" in one group with {', '.join(others)}" if others else ""
            choice = choices.units.get(name, units[name].choice)
            yield name, ModulePlan(f"unit{joined}", choice.reason)
        elif name in assignment.skipped:
            yield name, ModulePlan("no unit", assignment.skipped[name])
        elif home is None:
            yield name, ModulePlan("left alone", "no unit contains it")
        elif home in units:
            yield name, ModulePlan(f"part of unit {home or 'root'}", "it lies inside it")
        else:
            yield name, ModulePlan("replicated", choices.plain[home])


def _why_duplicate(first: str, structure: Structure) -> str:
    architecture = architecture_of(structure, first)
    shared = f", which {architecture} shares; handled as a tie" if architecture else ""
    return f"it is the same module as {first}{shared}"


def _others(
    structure: Structure, units: Mapping[str, str], plain: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    for held in structure.tensors.values():
        if isinstance(held.get(), DTensor):
            yield from ((alias, "sharded already, and left as it is") for alias in held.info.names)
        elif held.info.kind != "parameter":
            yield from ((alias, f"a {held.info.kind}, whole on every rank") for alias in held.info.names)
