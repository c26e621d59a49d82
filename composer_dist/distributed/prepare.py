"""The recipe: from the model a user has to one that trains on many devices.

    mesh -> plan -> agree -> activation checkpointing -> compile -> tensor parallel -> shard
         -> weights -> optimizer -> checks

Nothing is changed before the ranks agree, and an error on one rank is raised on all of them. After the
agreement a failure is raised on all ranks as well, and marks the model as unusable.
"""

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
from composer_dist.distributed.context_parallelism.context import expect_context
from composer_dist.distributed.mesh.build import meet
from composer_dist.distributed.optimizers.check import check_optimizers, check_refills, forgotten_optimizers
from composer_dist.distributed.optimizers.follow import Follower, carry_attributes
from composer_dist.distributed.plan.build import as_tuple, build_plan
from composer_dist.distributed.plan.plan import ParallelPlan, check_plan
from composer_dist.distributed.prepared import check_usable, record, usable_or_marked
from composer_dist.distributed.ranks import process_group as process_group
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.distributed.replication import apply as replication
from composer_dist.distributed.replication.plan import stays
from composer_dist.distributed.sharding import apply as sharding
from composer_dist.distributed.sharding.choose_units import composer_children
from composer_dist.distributed.steps import check_here, divide, meta_init
from composer_dist.distributed.tensor_parallel import apply as tensor_parallel
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
from composer_dist.precision import Precision
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
    """The recipe. Nothing is changed before `usable_or_marked`."""
    process_group.init(reuse=True)
    request: Request | None = None

    def wanted_mesh() -> MeshConfig | DeviceMesh:
        nonlocal request
        check_usable(model)
        request = ask()
        return request.mesh

    mesh, agreement = meet(wanted_mesh)
    assert request is not None
    reset_peak(mesh.device)
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
        check_here(structure, plan, mesh, optimizers)
    done = Preparation(model, plan, mesh.device_mesh)
    with done.step("agree"):
        disk = _open(request.weights, structure, plan, agreement)
        sources = decide_sources(agreement, structure, plan, optimizers, disk.names if disk else frozenset())
        components = _agree_on_initializers(agreement, structure, sources, request)
        done.initialized = tuple(sorted(sources.init))
        if (init_peak := peak_bytes(components, plan.delivery.bucket_bytes)) != plan.init_peak:
            plan = done.plan = replace(plan, init_peak=init_peak)
    objects_stay = plan.replication is not None and stays(structure, mesh.device)
    forgotten = [] if objects_stay else forgotten_optimizers(optimizers, structure)
    for warning in [*plan.warnings, *forgotten, *(disk.warnings() if disk else ())]:
        warnings.warn(warning, UserWarning, stacklevel=3)

    with usable_or_marked(model, agreement=agreement):
        with agreement.together("sharding"), done.step("shard"):
            follower = Follower(optimizers, structure, sources.states, sources.states_here, sources.init)
            structure, originals = divide(structure, plan, mesh)
            give_memory(structure, originals, mesh.device)
        filling = Filling(structure, originals, sources, components, disk, plan.delivery, mesh, agreement)
        done.bytes_moved, done.bytes_read, done.transport = filling.run(follower, done.step)
        if replica := plan.replication:
            agreement.collectively(
                "replication", lambda: replication.arm(structure, replica, mesh, optimizers)
            )
        with agreement.together("the final checks"), done.step("check"):
            for name, original in originals.items():
                carry_attributes(original, structure.tensors[name].get())  # type: ignore[arg-type]
            parameters = {name: structure.parameters[name].get() for name in plan.plain}
            done.plain_parameters = parameters  # type: ignore[assignment]
            assert_no_meta(model)
            sharding.finish(structure, plan.sharding)
            sharding.arm(structure, plan.sharding, mesh)
            expect_context(model, mesh)
            record(model).mesh = mesh
        tensor_parallel.arm(structure, plan.tensor_parallel, mesh, agreement)
    done.peak_memory = peak(mesh.device)
    if plan.verbose and agreement.rank == agreement.ranks[0]:
        print(plan, done, sep="\n")
    return done


def _open(
    weights: Weights, structure: Structure, plan: ParallelPlan, agreement: Agreement
) -> Pretrained | None:
    """The files given as `weights`, matched with the model."""
    return Pretrained.open(weights, structure, agreement, plan.delivery.strict) if weights else None


def _agree_on_initializers(
    agreement: Agreement, structure: Structure, sources: Sources, request: Request
) -> list[Component]:
    """What initializes the tensors that are on the meta device everywhere, the same on all ranks."""
    components: list[Component] = []
    with agreement.together("the initializers"):
        check_refills(request.optimizers, structure, sources.init)
        if sources.init:
            function = None if request.init_fn is meta_init else request.init_fn
            components = find_components(structure, set(sources.init), function)
    agreement.reach("what is initialized", describe_components(components), check_alike)
    return components


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
