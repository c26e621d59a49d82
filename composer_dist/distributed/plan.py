"""Making the plan, before anything is touched.

`plan_parallelism` reads a model (real or on the meta device) and a configuration and returns a
`ParallelPlan`: pure data, built without a process group, for any world size. `parallelize_model`
builds the same object and executes it, so what the plan says is what happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composer_dist.distributed.aliases import (
    Structure,
    ancestors,
    architecture_of,
    check_duplicates,
    read_structure,
)
from composer_dist.distributed.blocks import structural_units
from composer_dist.distributed.checkpoint_plan import plan_checkpointing
from composer_dist.distributed.codec_checks import check_codecs
from composer_dist.distributed.compiling import plan_compile
from composer_dist.distributed.config import (
    DDPConfig,
    FSDP2Config,
    ParallelismConfig,
    resolve_config,
)
from composer_dist.distributed.context_checks import check_context
from composer_dist.distributed.float8 import plan_float8
from composer_dist.distributed.forward_methods import check_forward_methods
from composer_dist.distributed.garbage import no_collection
from composer_dist.distributed.initialize import Component, find_components, peak_bytes
from composer_dist.distributed.mesh import mesh_sizes, own_mesh
from composer_dist.distributed.names import check_module
from composer_dist.distributed.optimizer_checks import check_optimizers
from composer_dist.distributed.parallel_plan import ModulePlan, ParallelPlan
from composer_dist.distributed.policies import Choices, WrapPolicy, choose_units
from composer_dist.distributed.replica_plan import check_unprepared, replicate_all
from composer_dist.distributed.skippable import plan_skippable
from composer_dist.distributed.tp_plan import idle_styles, plan_tensor_parallel
from composer_dist.distributed.unit_plan import idle_rules, plan_unit, with_tensor_parallel
from composer_dist.distributed.units import Assignment, assign
from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.precision import Precision
from composer_dist.wording import kind_in_words

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
    children: tuple[str, ...] = (),
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
        children: modules that are units unless somebody says no.

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
        children=children,
    )
    on_meta = {name for name, held in structure.tensors.items() if held.get().is_meta}
    components: list[Component] = []
    with suppress(ParallelismValueError):  # rank 0 may have what nothing here initialises
        components = find_components(structure, on_meta)
    return replace(plan, init_peak=peak_bytes(components, config.bucket_bytes))


@no_collection()
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
    from composer_dist.distributed import process_group

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
