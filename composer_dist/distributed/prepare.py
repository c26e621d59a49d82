"""The recipe: makes a user's model ready to train on many devices.

    mesh -> plan -> agree -> activation checkpointing -> compile -> tensor parallel -> shard
         -> weights -> optimizer -> checks

Nothing is changed before the ranks agree. An error on one rank is raised on all of them; after the agreement
it also marks the model as unusable.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from composer_dist import _torch
from composer_dist.config.parallelism import Config, ParallelismConfig, resolve_config
from composer_dist.distributed.account import Preparation, peak, reset_peak
from composer_dist.distributed.context_parallelism.context import expect_context
from composer_dist.distributed.mesh.build import meet
from composer_dist.distributed.mesh.mesh import Mesh
from composer_dist.distributed.optimizers.check import check_optimizers, check_steps, forgotten_optimizers
from composer_dist.distributed.optimizers.follow import Follower, carry_attributes
from composer_dist.distributed.optimizers.steps import check_former, watch_steps
from composer_dist.distributed.plan.build import as_tuple, build_plan
from composer_dist.distributed.plan.plan import ParallelPlan, check_plan
from composer_dist.distributed.prepared import check_usable, record, usable_or_marked
from composer_dist.distributed.ranks import process_group as process_group
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.distributed.replication import apply as replication
from composer_dist.distributed.replication.plan import stays
from composer_dist.distributed.restore import changes_noted
from composer_dist.distributed.sharding import apply as sharding
from composer_dist.distributed.sharding.choose_units import composer_children
from composer_dist.distributed.steps import check_here, collector_paused, divide, meta_init
from composer_dist.distributed.tensor_parallel import apply as tensor_parallel
from composer_dist.distributed.verification.verify import verify_model
from composer_dist.distributed.weights import initialize
from composer_dist.distributed.weights.disk import Pretrained, check_weights
from composer_dist.distributed.weights.fill import Filling
from composer_dist.distributed.weights.sources import Sources, decide_sources
from composer_dist.distributed.weights.storage import give_memory
from composer_dist.distributed.wishes import Request, WrapPolicy
from composer_dist.errors import ParallelismRuntimeError, ParallelismTypeError
from composer_dist.precision import Precision
from composer_dist.structure.structure import Structure, read_structure
from composer_dist.users_code import warn

Optimizers = Optimizer | Sequence[Optimizer] | None
ParallelizeFn = Callable[[nn.Module, DeviceMesh], nn.Module | None]
Weights = str | os.PathLike[str] | None


def parallelize_model(
    model: nn.Module,
    config: Config | ParallelPlan,
    optimizer: Optimizers = None,
    precision: str | Precision | None = None,
    fsdp_wrap_policy: WrapPolicy | None = None,
    activation_checkpointing_check_fn: Callable[[nn.Module], bool] | None = None,
    param_init_fn: initialize.InitFn | None = None,
    *,
    weights: Weights = None,
    parallelize_fn: ParallelizeFn | None = None,
    verify: Any = False,
) -> Preparation:
    """Make `model` ready to train on all ranks, in place. Every rank must call it.

    If all ranks hold real weights, each keeps its own after a comparison by hash. If some are on the meta
    device, rank 0's are delivered; if all are, the initializers run. `ParallelismConfig.sync` overrides this.
    Without a process group, one is made: the launcher's, or one of a single rank.

    Args:
        model: any module, real or on the meta device; it is not replaced, and nothing in it is renamed.
        config: what to do, or a plan made by `plan_parallelism` for a model of the same structure.
        optimizer: one or several, made before; afterwards they hold the sharded parameters, with the same
            groups, learning rates and state.
        precision: dtype of the computation; None casts nothing (see `composer_dist.precision`).
        fsdp_wrap_policy: `module -> bool | dict of options`, or a `CustomPolicy`; None takes rules,
            attributes, or the model's repeated blocks.
        activation_checkpointing_check_fn: `module -> bool`, which modules to checkpoint.
        param_init_fn: initializes one module that holds meta tensors, instead of `reset_parameters`.
        weights: a safetensors file; a directory as transformers, peft and `export_pretrained` write it; or
            what `save_checkpoint` writes, whose checksums are verified. Every rank reads its part of every
            tensor there, whatever the model holds. Unless `strict=False`, only an adapter's tensors may be
            missing; they get their values as without `weights`.
        parallelize_fn: the caller's own step `(model, mesh) -> model | None`, run first.
        verify: True checks the prepared model with `verify_model` at the end; so does a batch, with which
            outputs and gradients are compared too.

    Returns:
        The account of what was done; `.model` is `model` unless `parallelize_fn` returned another.

    Raises:
        ParallelismError: the same on every rank: of kind ValueError, TypeError or KeyError before anything is
            changed; afterwards (user functions, a lost peer) the model is unusable. A
            ParallelismRuntimeError with the table of `verify_model` if the verification finds a difference.
    """
    return _prepare(
        model,
        config,
        optimizer,
        parallelize_fn,
        verify=verify,
        precision=precision,
        wrap_policy=fsdp_wrap_policy,
        check_fn=activation_checkpointing_check_fn,
        weights=weights,
        init_fn=None if param_init_fn is meta_init else param_init_fn,
    )


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
    return _prepare(composer_model, config, optimizer, composer=True, precision=precision, weights=weights)


@collector_paused()
def _prepare(
    model: nn.Module,
    config: Config | ParallelPlan,
    optimizer: Optimizers,
    parallelize_fn: ParallelizeFn | None = None,
    composer: bool = False,
    verify: Any = False,
    **wishes: Any,
) -> Preparation:
    """The recipe. Nothing is changed before `_carry_out`, except by `parallelize_fn`."""
    process_group.init(reuse=True)

    def ask() -> Request:
        check_usable(model)
        if parallelize_fn is not None and not callable(parallelize_fn):
            raise ParallelismTypeError(
                f"parallelize_fn must be a function of a model and a mesh, not {parallelize_fn!r}."
            )
        if isinstance(config, ParallelPlan):
            resolved = ParallelismConfig(mesh=config.wanted_mesh(process_group.world_and_rank()[0]))
        else:
            resolved = resolve_config(config)
        check_weights(wishes.get("weights"), resolved.sync)
        children = composer_children(model) if composer else ()
        return Request(config=resolved, optimizers=as_tuple(optimizer), children=children, **wishes)

    request, mesh, agreement = meet(ask)
    reset_peak(mesh.device)
    if parallelize_fn is not None:
        model = _run_first(parallelize_fn, model, mesh.device_mesh, agreement)
    ready = config if isinstance(config, ParallelPlan) else None
    decided = _decide(model, request, ready, mesh, agreement)
    for warning in decided.warnings():
        warn(warning)
    _carry_out(decided)
    done = decided.done
    if verify is not None and verify is not False:
        with done.step("verify"):
            _verify(model, None if verify is True else verify, request.optimizers)
    done.peak_memory = peak(mesh.device)
    if done.plan.verbose and agreement.rank == agreement.ranks[0]:
        print(done.plan, done, sep="\n")
    return done


@dataclass
class _Decided:
    """What the ranks have agreed to do."""

    done: Preparation
    """The account, which has the model and the plan."""
    optimizers: Sequence[Optimizer]
    mesh: Mesh
    agreement: Agreement
    structure: Structure
    """The model's, before the preparation."""
    sources: Sources
    components: Sequence[initialize.Component]
    """What initializes the tensors in `sources.init`."""
    disk: Pretrained | None
    """Where the tensors in `sources.disk` are read from."""

    def warnings(self) -> list[str]:
        """What the user should know before the model is changed."""
        plan = self.done.plan
        objects_stay = plan.replication is not None and stays(self.structure, self.mesh.device)
        forgotten = [] if objects_stay else forgotten_optimizers(self.optimizers, self.structure)
        return [*plan.warnings, *forgotten, *(self.disk.warnings() if self.disk else ())]


def _decide(
    model: nn.Module, request: Request, ready: ParallelPlan | None, mesh: Mesh, agreement: Agreement
) -> _Decided:
    """Plan, and decide where each tensor's value comes from; nothing is changed.

    Args:
        ready: the plan, if the caller has made one.
    """
    optimizers = request.optimizers
    with agreement.together("the plan of the model"):
        structure = read_structure(model)
        check_former(structure)
        if ready is None:
            plan = build_plan(structure, request, mesh.sizes)
        else:
            plan = check_plan(ready, structure)
            check_optimizers(optimizers, structure, plan.plain, mesh.sizes)
        check_here(structure, plan, mesh, optimizers)
    done = Preparation(model, plan, mesh.device_mesh)
    with done.step("agree"):
        strict, weights = plan.delivery.strict, request.weights
        disk = None if weights is None else Pretrained.open(weights, structure, agreement, strict)
        sources = decide_sources(agreement, structure, plan, optimizers, disk.names if disk else frozenset())
        components = initialize.agree_on_components(
            structure, sources.init, request.init_fn, optimizers, agreement
        )
        done.initialized = tuple(sorted(sources.init))
        if (init_peak := initialize.peak_bytes(components, plan.delivery.bucket_bytes)) != plan.init_peak:
            done.plan = replace(plan, init_peak=init_peak)
    return _Decided(done, optimizers, mesh, agreement, structure, sources, components, disk)


def _carry_out(decided: _Decided) -> None:
    """Change the model and the optimizers; an error leaves the model marked as unusable."""
    done, optimizers, mesh, agreement = decided.done, decided.optimizers, decided.mesh, decided.agreement
    model, plan, sources = done.model, done.plan, decided.sources
    with usable_or_marked(model, agreement=agreement):
        with agreement.together("sharding"), done.step("shard"), changes_noted(model), _torch.cheap_detach():
            before = decided.structure
            follower = Follower(optimizers, before, sources.states, sources.states_here, sources.init)
            structure, originals = divide(before, plan, mesh)
            give_memory(structure, originals, mesh.device)
        filling = Filling(
            structure, originals, sources, decided.components, decided.disk, plan.delivery, mesh, agreement
        )
        done.bytes_moved, done.bytes_read, done.transport = filling.run(follower, done.step)
        if decided.disk is not None:
            decided.disk.set_extra_state()
        with changes_noted(model):
            if replica := plan.replication:
                agreement.collectively(
                    "replication", lambda: replication.arm(structure, replica, mesh, optimizers)
                )
            with agreement.together("the final checks"), done.step("check"):
                for name, original in originals.items():
                    carry_attributes(original, structure.tensors[name].get())  # type: ignore[arg-type]
                parameters = {name: structure.parameters[name].get() for name in plan.plain}
                done.plain_parameters = parameters  # type: ignore[assignment]
                initialize.assert_no_meta(model)
                sharding.finish(structure, plan.sharding)
                sharding.arm(structure, plan.sharding, mesh)
                expect_context(model, mesh)
                check_steps(model, mesh.sizes)
                record(model).mesh, record(model).plan = mesh, plan
                now = {name: held.get() for name, held in structure.parameters.items()}
                watch_steps(model, {name: old for name, old in follower.old.items() if old is not now[name]})
            tensor_parallel.arm(structure, plan.tensor_parallel, mesh, agreement)


def _verify(model: nn.Module, batch: Any, optimizers: Sequence[Optimizer]) -> None:
    found = verify_model(model, batch=batch, optimizer=optimizers or None)
    if not found.ok:
        raise ParallelismRuntimeError(f"The prepared model is not the one that was given.\n{found}")


def _run_first(
    function: ParallelizeFn, model: nn.Module, mesh: DeviceMesh, agreement: Agreement
) -> nn.Module:
    """Run the caller's own step. It may change the model, so a failure makes it unusable."""
    with usable_or_marked(model, agreement=agreement), agreement.together("parallelize_fn"):
        result = function(model, mesh)
        if result is not None and not isinstance(result, nn.Module):
            raise ParallelismTypeError(
                f"parallelize_fn must return a module or None, but returned {type(result).__name__}."
            )
    return model if result is None else result
