"""The steps of the recipe as separate functions, for users who write their own recipe.

They follow Composer's: shard a model with `prepare_fully_shard`, then fill it with `meta_init` or
`sync_module_states`. `parallelize_model` does all of it in one call.
"""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace as changed

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.parallelism import Config, ParallelismConfig, resolve_config
from composer_dist.distributed.activations import recompute as activations
from composer_dist.distributed.compiling import apply as compiling
from composer_dist.distributed.compiling import float8
from composer_dist.distributed.context_parallelism.context import expect_context
from composer_dist.distributed.mesh.build import meet, mesh_sizes
from composer_dist.distributed.mesh.mesh import Mesh
from composer_dist.distributed.moving.deliver import deliver, inner_cargoes
from composer_dist.distributed.moving.memory import check_pinning
from composer_dist.distributed.moving.scatter import write_full
from composer_dist.distributed.optimizers.check import check_hooks, check_steps
from composer_dist.distributed.optimizers.follow import carry_attributes
from composer_dist.distributed.optimizers.steps import watch_steps
from composer_dist.distributed.plan.build import as_tuple, build_plan, optimizer_named
from composer_dist.distributed.plan.decisions import Subject
from composer_dist.distributed.plan.plan import ParallelPlan
from composer_dist.distributed.prepared import check_module, check_usable, mesh_of, record, usable_or_marked
from composer_dist.distributed.ranks import process_group
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.distributed.replication.plan import check_replica
from composer_dist.distributed.restore import changes_noted
from composer_dist.distributed.sharding import apply as sharding
from composer_dist.distributed.sharding.apply import average_plain
from composer_dist.distributed.sharding.choose_units import composer_children
from composer_dist.distributed.tensor_parallel import apply as tensor_parallel
from composer_dist.distributed.weights import initialize
from composer_dist.distributed.weights.storage import give_memory, replace
from composer_dist.distributed.wishes import CheckFn, Request, WrapPolicy
from composer_dist.errors import ParallelismKeyError, ParallelismValueError
from composer_dist.precision import Precision, require_fp8
from composer_dist.structure.check_aliasing import check_aliasing
from composer_dist.structure.families import quiet_imports
from composer_dist.structure.structure import Held, Structure, read_structure
from composer_dist.tensors.inner import encoded
from composer_dist.users_code import warn


@contextmanager
def init_context(empty: bool = True, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Build models without allocating memory, optionally in another dtype.

    Args:
        empty: make parameters and buffers on the meta device.
        dtype: default floating-point dtype; None keeps the current one.
    """
    before = torch.get_default_dtype()
    try:
        if dtype is not None:
            torch.set_default_dtype(dtype)
        with torch.device("meta") if empty else nullcontext(), quiet_imports():
            yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector: it would look at all the new objects again and again, and find nothing."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@collector_paused()
def plan_parallelism(
    model: nn.Module,
    config: Config,
    *,
    world_size: int | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | str | None = None,
    precision: str | Precision | None = None,
    fsdp_wrap_policy: WrapPolicy | None = None,
    activation_checkpointing_check_fn: CheckFn | None = None,
    composer: bool = False,
) -> ParallelPlan:
    """Plan how to parallelize `model`, without changing it and without a process group.

    The arguments are those of `parallelize_model`, except:

    Args:
        world_size: number of ranks to plan for; None takes the process group's, or 1.
        optimizer: checked against the plan, if given. The name of a class in torch.optim ("AdamW") is for
            estimates alone: of such an optimizer, with its defaults, of all trainable parameters.
        composer: plan as `parallelize_composer_model` and the Trainer prepare a `ComposerModel`.

    Raises:
        ParallelismError: everything that `parallelize_model` can detect before it changes the model.
    """
    check_module(model)
    optimizers = as_tuple(optimizer_named(optimizer, model) if isinstance(optimizer, str) else optimizer)
    request = Request(
        config=resolve_config(config),
        precision=precision,
        wrap_policy=fsdp_wrap_policy,
        check_fn=activation_checkpointing_check_fn,
        children=composer_children(model) if composer else (),
        optimizers=optimizers,
    )
    structure = read_structure(model)
    world = process_group.world_and_rank()[0] if world_size is None else world_size
    plan = build_plan(structure, request, mesh_sizes(request.mesh, world))
    on_meta = {name for name, held in structure.tensors.items() if held.get().is_meta}
    components: list[initialize.Component] = []
    with suppress(ParallelismValueError):  # rank 0 may have values for what nothing initializes
        components = initialize.find_components(structure, on_meta)
    if isinstance(optimizer, str):  # nothing holds the one that was made for the checks
        plan = changed(plan, subject=Subject(structure, tuple(map(type, optimizers))))
    init_peak = initialize.peak_bytes(components, plan.delivery.bucket_bytes)
    return changed(plan, init_peak=init_peak)


def meta_init(module: nn.Module, param_init_fn: initialize.InitFn | None = None) -> None:
    """Initialize every tensor of `module` that is on the meta device, in place.

    For the same `torch.initial_seed()`, device type and torch version, `parallelize_model` gives the same
    bits on any number of ranks as this function gives an unsharded module in one process. On a module sharded
    by `prepare_fully_shard`, each rank computes every tensor in full, one component at a time, and keeps its
    rows; seed all ranks identically. The random state is restored afterwards.

    Args:
        param_init_fn: called with each module that directly holds a meta tensor; None uses the
            `param_init_fn` of the module or its nearest ancestor, else `reset_parameters`.

    Raises:
        ParallelismValueError: tensors that no initializer writes, with their modules' classes.
    """
    structure = read_structure(module)
    needed = {name for name, held in structure.tensors.items() if held.get().is_meta}
    mesh = mesh_of(module)
    device = torch.get_default_device() if mesh is None else mesh.device
    real = {
        name: held.get()
        for name, held in structure.tensors.items()
        if name not in needed and not isinstance(held.get(), DTensor)
    }
    components = initialize.find_components(structure, needed, param_init_fn)
    sharded = [name for name in needed if isinstance(structure.tensors[name].get(), DTensor)]
    give_memory(structure, sharded, device)
    for component in components:
        values = initialize.run_component(component, structure, torch.initial_seed(), device, real)
        for name in needed.intersection(component.tensors):
            held = structure.tensors[name]
            if isinstance(held.get(), DTensor):
                write_full(held.get(), values[name])
            else:
                replace(held, values[name])
    if mesh is not None:
        average_plain(structure, mesh.fsdp, needed)


@collector_paused()
def prepare_fully_shard(
    model: nn.Module,
    fsdp2_config: FSDP2Config | ParallelismConfig | Mapping[str, object] | str,
    precision: str | Precision | None = None,
    auto_wrap_policy: WrapPolicy | None = None,
) -> ParallelPlan:
    """Plan and shard `model` in place; every rank keeps its rows of its own values.

    Tensors on the meta device become shards on the meta device. Values are not synchronized between ranks.

    Raises:
        ParallelismError: as `plan_parallelism`; the same on every rank.
    """
    process_group.init(reuse=True)

    def ask() -> Request:
        check_usable(model)
        config = resolve_config(fsdp2_config)
        _check_only_shards(config)
        return Request(config=config, precision=precision, wrap_policy=auto_wrap_policy)

    request, mesh, agreement = meet(ask)
    with agreement.together("the plan of the model"):
        structure = read_structure(model)
        plan = build_plan(structure, request, mesh.sizes)
        check_here(structure, plan, mesh)
    for warning in plan.warnings:
        warn(warning)
    with usable_or_marked(model, agreement=agreement), changes_noted(model):
        structure, originals = divide(structure, plan, mesh)
        real = {name: original for name, original in originals.items() if not original.is_meta}
        give_memory(structure, real, mesh.device)
        for name, original in originals.items():
            now = structure.tensors[name].get()
            carry_attributes(original, now)  # type: ignore[arg-type]
            if name in real:
                write_full(now, original)
        for name in plan.plain:
            held = structure.tensors[name]
            if not held.get().is_contiguous():
                replace(held, held.get().detach().contiguous())
        sharding.arm(structure, plan.sharding, mesh)
        expect_context(model, mesh)
        check_steps(model, mesh.sizes)
        watch_steps(model, {})
        record(model).mesh, record(model).bucket_bytes = mesh, plan.delivery.bucket_bytes
    if plan.verbose and agreement.rank == agreement.ranks[0]:
        print(plan)
    return plan


def _check_only_shards(config: ParallelismConfig) -> None:
    """Refuse options that `prepare_fully_shard` does not carry out."""
    if config.ddp or config.tp or any(rule.tp is not None for rule in config.rules):
        raise ParallelismValueError(
            "prepare_fully_shard only shards; use parallelize_model for DDP and tensor parallelism."
        )
    for option in ("sync", "transport"):
        if (value := getattr(config, option)) != "auto":
            raise ParallelismValueError(
                f"prepare_fully_shard neither delivers nor compares weights, so {option}={value!r} has no "
                "effect; call sync_module_states afterwards, or use parallelize_model."
            )


def check_here(
    structure: Structure, plan: ParallelPlan, mesh: Mesh, optimizers: Sequence[Optimizer] = ()
) -> None:
    """Refuse a plan that cannot be carried out with this model's objects, or on this machine."""
    check_aliasing(structure, plan.plain)
    pinned = [f"cpu_offload='pinned' (unit {u.name or 'root'})" for u in plan.units if u.offload == "pinned"]
    pinned += [f"pin_memory=True ({c.module})" for c in plan.checkpointing if c.options.get("pin_memory")]
    check_pinning(pinned)
    if plan.float8:
        require_fp8(mesh.device)
    check_hooks(structure, plan.plain)
    if plan.replication:
        check_replica(plan.replication, structure, optimizers, mesh)


def divide(structure: Structure, plan: ParallelPlan, mesh: Mesh) -> tuple[Structure, dict[str, torch.Tensor]]:
    """Wrap the modules' forwards, and replace divided parameters by this rank's parts, on the meta device.

    The order matters: torchao replaces classes; checkpointing must be inside compilation, and both inside the
    collectives of tensor parallelism; FSDP2 shards what tensor parallelism has cut. The results are the new
    structure, and the divided parameters as they were before, by first name.
    """
    float8.apply(structure, plan.compiling)
    structure = activations.apply(structure, plan.activations)
    compiling.apply(structure, plan.compiling)
    originals = tensor_parallel.apply(structure, plan.tensor_parallel, mesh)
    return structure, originals | sharding.apply(structure, plan.sharding, mesh)


def sync_module_states(model: nn.Module, full_state_dict: Mapping[str, torch.Tensor]) -> None:
    """Fill a sharded model, including its buffers, from rank 0's full state; a collective.

    Args:
        model: sharded; on the meta device or not.
        full_state_dict: full tensors by name. Buffers that it lacks are taken from rank 0's model. Only rank
            0's is read; the other ranks may pass `{}`.

    Raises:
        ParallelismKeyError: rank 0's state lacks a parameter; the same on every rank.
        ParallelismValueError: nothing in the model is sharded, or a shape differs.
    """
    structure = read_structure(model)
    mesh = mesh_of(model)
    if mesh is None or not any(isinstance(held.get(), DTensor) for held in structure.parameters.values()):
        raise ParallelismValueError("The model is not sharded; call prepare_fully_shard first.")
    agreement = Agreement(mesh.ranks)
    first = agreement.ranks[0]
    sources: dict[str, torch.Tensor] = {}
    agreement.reach("the model", structure.digest, _check_same)
    with agreement.together("rank 0's state"):
        if agreement.rank == first:
            sources = {name: _find(held, full_state_dict) for name, held in structure.tensors.items()}
    on_meta = {name for name, held in structure.tensors.items() if held.get().is_meta}
    give_memory(structure, structure.tensors, mesh.device)
    cargoes = [
        cargo
        for name, held in structure.tensors.items()
        for cargo in inner_cargoes(name, held.get(), sources.get(name))
    ]
    limit = record(model).bucket_bytes
    agreement.collectively("the delivery", lambda: deliver({first: cargoes}, mesh, limit))
    average_plain(structure, mesh.fsdp, on_meta)


def _check_same(digests: Sequence[str]) -> None:
    if len(set(digests)) > 1:
        raise ParallelismValueError(
            "The ranks hold models of different structure: names, shapes, dtypes, frozen parameters or ties."
        )


def _find(held: Held, full_state_dict: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Rank 0's value of a tensor: from the state, or, for a buffer that it lacks, from rank 0's model."""
    info = held.info
    value = next((full_state_dict[name] for name in info.names if name in full_state_dict), None)
    if value is None:
        value = held.get()
        if info.kind == "parameter" or value.is_meta:
            raise ParallelismKeyError(
                f"full_state_dict has no {info.name!r}"
                + (", which is on the meta device in rank 0's model." if value.is_meta else ".")
            )
    if tuple(value.shape) != info.shape:
        raise ParallelismValueError(
            f"{info.name}: shape {tuple(value.shape)} in full_state_dict, {info.shape} in the model."
        )
    return encoded(value, held.get())
