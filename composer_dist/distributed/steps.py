"""The recipe's steps one by one, for those who write a recipe of their own.

`parallelize_model` needs none of them. They follow Composer's: shard a model with
`prepare_fully_shard`, then fill it with `meta_init` or `sync_module_states`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace as changed

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.mesh import MeshConfig
from composer_dist.config.parallelism import Config, ParallelismConfig, resolve_config
from composer_dist.distributed.activations import recompute as activations
from composer_dist.distributed.activations.recompute import check_pinning
from composer_dist.distributed.compiling import apply as compiling
from composer_dist.distributed.compiling import float8
from composer_dist.distributed.context_parallelism.context import expect_context
from composer_dist.distributed.mesh.build import meet, mesh_sizes
from composer_dist.distributed.mesh.layout import Layout
from composer_dist.distributed.mesh.mesh import Mesh
from composer_dist.distributed.moving.messages import Cargo
from composer_dist.distributed.moving.transfer import deliver, inner_cargoes, take_part
from composer_dist.distributed.optimizers.check import check_hooks
from composer_dist.distributed.optimizers.follow import carry_attributes
from composer_dist.distributed.plan.build import as_tuple, build_plan
from composer_dist.distributed.plan.plan import ParallelPlan
from composer_dist.distributed.prepared import check_module, check_usable, mesh_of, record, usable_or_marked
from composer_dist.distributed.ranks import process_group
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.distributed.replication.plan import check_replica
from composer_dist.distributed.sharding import apply as sharding
from composer_dist.distributed.sharding.apply import average_plain, check_offload
from composer_dist.distributed.sharding.choose_units import composer_children
from composer_dist.distributed.tensor_parallel import apply as tensor_parallel
from composer_dist.distributed.weights.initialize import (
    Component,
    InitFn,
    find_components,
    peak_bytes,
    run_component,
)
from composer_dist.distributed.weights.storage import give_memory, replace
from composer_dist.distributed.wishes import CheckFn, Request, WrapPolicy
from composer_dist.errors import ParallelismKeyError, ParallelismValueError
from composer_dist.precision import Precision, require_fp8
from composer_dist.structure.check_shared import check_aliasing
from composer_dist.structure.structure import Held, Structure, read_structure
from composer_dist.tensors.inner import encoded


@contextmanager
def init_context(empty: bool = True, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Build models without memory, in a dtype of choice.

    Args:
        empty: parameters and buffers made inside are on the meta device.
        dtype: their floating-point dtype; None leaves the default.
    """
    before = torch.get_default_dtype()
    try:
        if dtype is not None:
            torch.set_default_dtype(dtype)
        with torch.device("meta") if empty else nullcontext():
            yield
    finally:
        torch.set_default_dtype(before)


def plan_parallelism(
    model: nn.Module,
    config: Config,
    *,
    world_size: int | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    precision: str | Precision | None = None,
    fsdp_wrap_policy: WrapPolicy | None = None,
    activation_checkpointing_check_fn: CheckFn | None = None,
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
    request = Request(
        config=resolve_config(config),
        precision=precision,
        wrap_policy=fsdp_wrap_policy,
        check_fn=activation_checkpointing_check_fn,
        children=composer_children(model) if composer else (),
        optimizers=as_tuple(optimizer),
    )
    structure = read_structure(model)
    world = process_group.world_and_rank()[0] if world_size is None else world_size
    plan = build_plan(structure, request, mesh_sizes(request.mesh, world))
    on_meta = {name for name, held in structure.tensors.items() if held.get().is_meta}
    components: list[Component] = []
    with suppress(ParallelismValueError):  # rank 0 may have what nothing here initializes
        components = find_components(structure, on_meta)
    return changed(plan, init_peak=peak_bytes(components, plan.delivery.bucket_bytes))


def meta_init(module: nn.Module, param_init_fn: InitFn | None = None) -> None:
    """Initialize every tensor of `module` that is on the meta device, in place.

    In one process on an unsharded module this is the reference for `parallelize_model`, which gives the same
    bits on any number of ranks for the same `torch.initial_seed()`, device type and torch version. On a
    module sharded by `prepare_fully_shard` each rank computes every tensor in full, one component after the
    other, and keeps its rows; seed all ranks alike. The random state afterwards is as it was before.

    Args:
        param_init_fn: called with each module that holds a meta tensor directly; None looks for
            `param_init_fn` on the module and its ancestors, then for `reset_parameters`.

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
    components = find_components(structure, needed, param_init_fn)
    sharded = [name for name in needed if isinstance(structure.tensors[name].get(), DTensor)]
    homes = give_memory(structure, sharded, device)
    for component in components:
        values = run_component(component, structure, torch.initial_seed(), device, real)
        for name in needed.intersection(component.tensors):
            held = structure.tensors[name]
            now = held.get()
            if isinstance(now, DTensor):
                cargo = Cargo(name, Layout.of(now), now.dtype, homes[name], values[name])
                take_part(cargo, Mesh.of(now).here)
            else:
                replace(held, values[name])
    if mesh is not None:
        average_plain(structure, mesh.fsdp, needed)


def prepare_fully_shard(
    model: nn.Module,
    fsdp2_config: FSDP2Config | ParallelismConfig | Mapping[str, object] | str,
    precision: str | Precision | None = None,
    auto_wrap_policy: WrapPolicy | None = None,
) -> ParallelPlan:
    """Plan and shard `model` in place; every rank keeps its rows of its own values.

    What is on the meta device stays there, as meta shards. Nothing is synchronized between ranks.

    Raises:
        ParallelismError: as `plan_parallelism`; the same on every rank.
    """
    process_group.init(reuse=True)
    request: Request | None = None

    def ask() -> MeshConfig | DeviceMesh:
        nonlocal request
        check_usable(model)
        config = resolve_config(fsdp2_config)
        request = Request(config=config, precision=precision, wrap_policy=auto_wrap_policy)
        _check_only_shards(request)
        return request.mesh

    mesh, agreement = meet(ask)
    assert request is not None
    with agreement.together("the plan of the model"):
        structure = read_structure(model)
        plan = build_plan(structure, request, mesh.sizes)
        check_here(structure, plan, mesh)
    with usable_or_marked(model, agreement=agreement):
        structure, originals = divide(structure, plan, mesh)
        real = {name: original for name, original in originals.items() if not original.is_meta}
        give_memory(structure, real, mesh.device)
        for name, original in originals.items():
            now = structure.tensors[name].get()
            carry_attributes(original, now)  # type: ignore[arg-type]
            for cargo in inner_cargoes(name, now, original) if name in real else ():
                take_part(cargo, mesh.here)
        for name in plan.plain:
            held = structure.tensors[name]
            if not held.get().is_contiguous():
                replace(held, held.get().detach().contiguous())
        sharding.arm(structure, plan.sharding, mesh)
        expect_context(model, mesh)
        record(model).mesh = mesh
    if plan.verbose and agreement.rank == agreement.ranks[0]:
        print(plan)
    return plan


def _check_only_shards(request: Request) -> None:
    """Refuse what `prepare_fully_shard` would leave undone."""
    config = request.config
    if config.ddp is not None:
        raise ParallelismValueError("prepare_fully_shard shards; DDP (ddp=) is for parallelize_model.")
    if config.tp is not None or any(rule.tp is not None for rule in config.rules):
        raise ParallelismValueError(
            "prepare_fully_shard only shards; use parallelize_model for tensor parallelism."
        )
    if config.sync != "auto":
        raise ParallelismValueError(
            f"prepare_fully_shard neither delivers nor compares weights, so sync={config.sync!r} has no "
            "effect; call sync_module_states afterwards, or use parallelize_model."
        )


def check_here(
    structure: Structure, plan: ParallelPlan, mesh: Mesh, optimizers: Sequence[Optimizer] = ()
) -> None:
    """Refuse what is planned but cannot be done with this very model, or on this machine.

    Raises:
        ParallelismError: see the checks of the features.
    """
    check_aliasing(structure, plan.plain)
    check_offload(plan.sharding)
    check_pinning(plan.activations)
    if plan.float8:
        require_fp8(mesh.device)
    check_hooks(structure, plan.plain)
    if plan.replication:
        check_replica(plan.replication, structure, optimizers, mesh)


def divide(structure: Structure, plan: ParallelPlan, mesh: Mesh) -> tuple[Structure, dict[str, torch.Tensor]]:
    """Give each rank its part of every parameter, on the meta device, and modules their forwards.

    The order counts: torchao replaces classes, checkpointing goes inside of compilation, both inside of
    the collectives of tensor parallelism, and FSDP2 shards what tensor parallelism has cut.

    Returns:
        The structure afterwards, and the divided parameters as they were before, by first name.
    """
    float8.apply(structure, plan.compiling)
    structure = activations.apply(structure, plan.activations)
    compiling.apply(structure, plan.compiling)
    originals = tensor_parallel.apply(structure, plan.tensor_parallel, mesh)
    return structure, originals | sharding.apply(structure, plan.sharding, mesh)


def sync_module_states(model: nn.Module, full_state_dict: Mapping[str, torch.Tensor]) -> None:
    """Fill a sharded model from rank 0's full state, buffers included.

    Args:
        model: sharded over ranks that all call this; on meta or not.
        full_state_dict: on rank 0, full tensors by name; buffers that it lacks are taken from rank
            0's model. Other ranks pass anything, `{}` for instance.

    Raises:
        ParallelismKeyError: parameters that rank 0's state lacks; the same on every rank.
        ParallelismValueError: nothing in the model is sharded, or a shape differs.
    """
    structure = read_structure(model)
    mesh = mesh_of(model)
    if mesh is None or not any(isinstance(held.get(), DTensor) for held in structure.parameters.values()):
        raise ParallelismValueError("The model is not sharded; call prepare_fully_shard first.")
    agreement = Agreement(mesh.ranks)
    first = agreement.ranks[0]
    sources: dict[str, torch.Tensor] = {}
    agreement.reach("the model", structure.digest(), _check_same)
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
    limit = ParallelismConfig().bucket_bytes
    agreement.collectively("the delivery", lambda: deliver({first: cargoes}, mesh, limit))
    average_plain(structure, mesh.fsdp, on_meta)


def _check_same(digests: Sequence[str]) -> None:
    if len(set(digests)) > 1:
        raise ParallelismValueError(
            "The ranks hold models of different structure: names, shapes, dtypes, frozen parameters or ties."
        )


def _find(held: Held, full_state_dict: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Rank 0's value of a tensor: from the state, or of a buffer that is not there, from its model."""
    info = held.info
    value = next((full_state_dict[name] for name in info.names if name in full_state_dict), None)
    if value is None:
        value = held.get()
        if info.kind == "parameter" or value.is_meta:
            raise ParallelismKeyError(
                f"full_state_dict has no {info.name!r}"
                + (", which rank 0's model holds on the meta device." if value.is_meta else ".")
            )
    if tuple(value.shape) != info.shape:
        raise ParallelismValueError(
            f"{info.name}: shape {tuple(value.shape)} in full_state_dict, {info.shape} in the model."
        )
    return encoded(value, held.get())
