"""The recipe: from the model a user has to one that trains on many devices.

    mesh -> plan -> agree -> activation checkpointing -> compile -> tensor parallel -> shard
         -> weights -> optimizer -> checks

Up to the agreement nothing is touched, and whatever is wrong on one rank is raised on all. After it,
a failure anywhere is raised everywhere too, and leaves the model marked as unusable.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from composer_dist.config.mesh import MeshConfig
from composer_dist.config.parallelism import Config, ParallelismConfig, resolve_config
from composer_dist.distributed.account import Preparation, peak, reset_peak
from composer_dist.distributed.activations.plan import apply_checkpointing, check_pinning
from composer_dist.distributed.compiling.apply import compile_modules
from composer_dist.distributed.compiling.float8 import convert_linears
from composer_dist.distributed.context_parallelism.context import expect_context
from composer_dist.distributed.mesh.build import meet
from composer_dist.distributed.mesh.mesh import Mesh
from composer_dist.distributed.moving.way import Transport
from composer_dist.distributed.optimizers.check import (
    check_hooks,
    check_optimizers,
    check_refills,
    forgotten_optimizers,
)
from composer_dist.distributed.optimizers.follow import Follower, carry_attributes
from composer_dist.distributed.plan.build import as_tuple, build_plan
from composer_dist.distributed.plan.plan import ParallelPlan, check_plan
from composer_dist.distributed.prepared import check_usable, record, usable_or_marked
from composer_dist.distributed.ranks import process_group as process_group
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.distributed.replication.apply import replicate
from composer_dist.distributed.replication.plan import check_replica, stays
from composer_dist.distributed.sharding.apply import check_offload, finish, hook_units, shard
from composer_dist.distributed.sharding.choose import composer_children
from composer_dist.distributed.steps import meta_init
from composer_dist.distributed.tensor_parallel.apply import finish_tensor_parallel
from composer_dist.distributed.training.averaging import average_plain_gradients
from composer_dist.distributed.weights.disk import Pretrained, check_weights
from composer_dist.distributed.weights.fill import Filling
from composer_dist.distributed.weights.initialize import (
    Component,
    InitFn,
    assert_no_meta,
    check_alike,
    describe_components,
    find_components,
    peak_bytes,
)
from composer_dist.distributed.weights.sources import Sources, decide_sources
from composer_dist.distributed.weights.storage import give_memory
from composer_dist.distributed.wishes import Request, WrapPolicy
from composer_dist.errors import ParallelismTypeError
from composer_dist.precision import Precision, require_fp8
from composer_dist.structure.shared import check_aliasing
from composer_dist.structure.structure import Structure, read_structure

Optimizers = Optimizer | Sequence[Optimizer] | None
Weights = str | os.PathLike[str] | None


def parallelize_model(
    model: nn.Module,
    config: Config | ParallelPlan,
    optimizer: Optimizers = None,
    precision: str | Precision | None = None,
    fsdp_wrap_policy: WrapPolicy | None = None,
    activation_checkpointing_check_fn: Callable[[nn.Module], bool] | None = None,
    param_init_fn: InitFn | None = None,
    *,
    weights: Weights = None,
    parallelize_fn: Callable[[nn.Module, DeviceMesh], nn.Module | None] | None = None,
) -> Preparation:
    """Make `model` ready to train on all ranks, in place. Every rank must call it.

    Weights come from rank 0 where other ranks hold theirs on the meta device; from each rank's own
    copy where all are real, after a comparison by hash; from the initializers where all are on meta.
    `ParallelismConfig.sync` says otherwise. Without a process group one is made: the launcher's, or
    one of a single rank.

    Args:
        model: any module, real or on the meta device; never replaced, and nothing in it renamed.
        config: what to do, or a plan made by `plan_parallelism` for a model of the same structure.
        optimizer: one or several, made before; they hold the sharded parameters afterwards, with
            their groups, learning rates and state.
        precision: dtype of the computation; None casts nothing (see `composer_dist.precision`).
        fsdp_wrap_policy: `module -> bool | dict of options`, or a `CustomPolicy`; None takes rules,
            attributes, or the model's repeated blocks.
        activation_checkpointing_check_fn: `module -> bool`, which modules to checkpoint.
        param_init_fn: initializes one module that holds meta tensors, in place of `reset_parameters`.
        weights: a safetensors file; a directory as transformers, peft and `export_pretrained` write it; or
            what `save_checkpoint` writes, whose checksums are verified. Every rank reads its part of every
            tensor in there, whatever the model held; what is not in there must be of an adapter, unless
            `strict=False`, and is treated as without.
        parallelize_fn: the caller's own step `(model, mesh) -> model | None`, run first.

    Returns:
        The account of what was done; `.model` is `model` unless `parallelize_fn` returned another.

    Raises:
        ParallelismError: the same on every rank: of kind ValueError, TypeError or KeyError before
            anything is touched; afterwards (user functions, a lost peer) the model is unusable.
    """

    def ask() -> Request:
        return _request(
            config,
            optimizer,
            precision=precision,
            wrap_policy=fsdp_wrap_policy,
            check_fn=activation_checkpointing_check_fn,
            weights=weights,
            init_fn=param_init_fn,
        )

    return _prepare(model, ask, config if isinstance(config, ParallelPlan) else None, parallelize_fn)


def parallelize_composer_model(
    composer_model: nn.Module,
    optimizer: Optimizers = None,
    config: Config | ParallelPlan = "fsdp",
    precision: str | Precision | None = None,
    *,
    weights: Weights = None,
) -> Preparation:
    """`parallelize_model` for a `ComposerModel`: its direct children are units, and it takes the rest.

    Metrics are left out. Attributes on the model (`fsdp_wrap_fn`, `param_init_fn`,
    `activation_checkpointing_fn` and their like) count as they do in `parallelize_model`.

    Raises:
        ParallelismTypeError: not a ComposerModel.
    """

    def ask() -> Request:
        children = composer_children(composer_model)
        return _request(config, optimizer, precision=precision, children=children, weights=weights)

    return _prepare(composer_model, ask, config if isinstance(config, ParallelPlan) else None)


def _request(config: Config | ParallelPlan, optimizer: Optimizers, **wishes: Any) -> Request:
    """What one call asks for; of a ready plan only the mesh counts."""
    if isinstance(config, ParallelPlan):
        resolved = ParallelismConfig(mesh=config.wanted_mesh(process_group.world_and_rank()[0]))
    else:
        resolved = resolve_config(config)
    check_weights(wishes.get("weights"), resolved.sync)
    return Request(config=resolved, optimizers=as_tuple(optimizer), **wishes)


def _prepare(
    model: nn.Module,
    ask: Callable[[], Request],
    ready: ParallelPlan | None,
    parallelize_fn: Callable[[nn.Module, DeviceMesh], nn.Module | None] | None = None,
) -> Preparation:
    process_group.init(reuse=True)
    request: Request | None = None

    def wanted_mesh() -> MeshConfig | DeviceMesh:
        nonlocal request
        check_usable(model)
        request = ask()
        return request.mesh

    mesh, agreement = meet(wanted_mesh)
    assert request is not None
    device = mesh.device
    reset_peak(device)
    if parallelize_fn is not None:
        model = _run_first(parallelize_fn, model, mesh.device_mesh, agreement)
    optimizers = request.optimizers

    with agreement.together("the plan of the model"):
        structure = read_structure(model)
        if ready is None:
            plan = build_plan(structure, request, mesh.sizes)
        else:
            plan = check_plan(ready, structure)
            check_optimizers(optimizers, structure, plan.plain)
        check_aliasing(structure, plan.plain)
        check_offload(plan)
        check_pinning(plan.checkpointing)
        if plan.float8:
            require_fp8(device)
        check_hooks(structure, plan.plain)
        if plan.replication:
            check_replica(plan.replication, structure, optimizers, mesh)
    done = Preparation(model, plan, mesh.device_mesh)
    with done.step("agree"):
        weights = request.weights
        disk = Pretrained.open(weights, structure, agreement, plan.delivery.strict) if weights else None
        names = disk.names if disk else frozenset()
        sources = decide_sources(agreement, structure, plan, optimizers, names)
        done.initialized = tuple(sorted(sources.init))
        components: list[Component] = []
        with agreement.together("the initializers"):
            check_refills(optimizers, structure, sources.init)
            if sources.init:
                function = None if request.init_fn is meta_init else request.init_fn
                components = find_components(structure, set(sources.init), function)
        agreement.reach("what is initialized", describe_components(components), check_alike)
        init_peak = peak_bytes(components, plan.delivery.bucket_bytes)
        if init_peak != plan.init_peak:
            plan = done.plan = replace(plan, init_peak=init_peak)
    objects_stay = plan.replication is not None and stays(structure, device)
    forgotten = [] if objects_stay else forgotten_optimizers(optimizers, structure)
    for warning in [*plan.warnings, *forgotten, *(disk.warnings() if disk else ())]:
        warnings.warn(warning, UserWarning, stacklevel=3)

    with usable_or_marked(model, agreement=agreement):
        _execute(done, mesh, structure, sources, components, optimizers, agreement, disk)
    done.peak_memory = peak(device)
    if plan.verbose and agreement.rank == agreement.ranks[0]:
        print(plan, done, sep="\n")
    return done


def _execute(
    done: Preparation,
    mesh: Mesh,
    structure: Structure,
    sources: Sources,
    components: Sequence[Component],
    optimizers: Sequence[Optimizer],
    agreement: Agreement,
    disk: Pretrained | None,
) -> None:
    """Carry out the plan; from here on the model changes."""
    plan = done.plan
    with agreement.together("sharding"), done.step("shard"):
        follower = Follower(optimizers, structure, sources.states, sources.states_here, sources.init)
        if plan.float8:
            convert_linears(structure.modules, plan.float8)
        if plan.checkpointing:
            apply_checkpointing(done.model, plan.checkpointing)
            structure = read_structure(done.model)
        compile_modules(structure.modules, plan.compiled)
        originals = shard(structure, plan, mesh)
        give_memory(structure, originals, mesh.device)
    limit = plan.delivery.bucket_bytes
    with Transport(mesh.device_mesh, agreement, limit, plan.delivery.transport) as transport:
        filling = Filling(structure, originals, sources, mesh, agreement, transport, limit, disk)
        with done.step("weights"):
            filling.deliver_weights()
        if components:
            with done.step("initialize"):
                filling.initialize(components)
        with done.step("optimizer"):
            new = {name: held.get() for name, held in structure.parameters.items()}
            filling.deliver_states(follower, new)  # type: ignore[arg-type]
            follower.rebind(new)  # type: ignore[arg-type]
    done.bytes_moved, done.transport = transport.moved, transport.way
    if disk:
        done.bytes_moved, done.bytes_read = done.bytes_moved + disk.bytes_moved, disk.bytes_read
    if replica := plan.replication:
        agreement.collectively("replication", lambda: replicate(structure, replica, mesh, optimizers))
    with agreement.together("the final checks"), done.step("check"):
        for name, original in originals.items():
            carry_attributes(original, new[name])  # type: ignore[arg-type]
        done.plain_parameters = {name: new[name] for name in plan.plain}  # type: ignore[misc]
        trainable = {n: p for n, p in done.plain_parameters.items() if p.requires_grad}
        if trainable and not replica and mesh.fsdp is not None:
            average_plain_gradients(done.model, trainable, mesh.fsdp)
        assert_no_meta(done.model)
        finish(structure, plan)
        hook_units(structure, plan, mesh)
        record(done.model).mesh = mesh
        expect_context(done.model, mesh)
    if plan.tensor_parallel is not None:
        finish_tensor_parallel(structure, plan.tensor_parallel, mesh, agreement)


def _run_first(
    function: Callable[[nn.Module, DeviceMesh], nn.Module | None],
    model: nn.Module,
    mesh: DeviceMesh,
    agreement: Agreement,
) -> nn.Module:
    """The caller's own step; it may change the model, so a failure makes it unusable."""
    with usable_or_marked(model, agreement=agreement), agreement.together("parallelize_fn"):
        result = function(model, mesh)
        if result is not None and not isinstance(result, nn.Module):
            raise ParallelismTypeError(
                f"parallelize_fn must return a module or None, but returned {type(result).__name__}."
            )
    return model if result is None else result
