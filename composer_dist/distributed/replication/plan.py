"""The plan of a model that every rank holds whole, and whose gradients DDP averages."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from math import prod
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn import SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from composer_dist import _torch
from composer_dist.config.replicate import DDPConfig
from composer_dist.config.rule import Rule
from composer_dist.distributed import prepared
from composer_dist.distributed.feature_plan import Change, FeaturePlan, Rank, StepEvent
from composer_dist.distributed.mesh.mesh import Mesh
from composer_dist.distributed.replication.batch_norm import find_batch_norms
from composer_dist.distributed.replication.communication import FIRST_BUCKET, BucketTraffic
from composer_dist.distributed.replication.hooks import DTYPES, HookPlan, plan_comm_hook
from composer_dist.distributed.wishes import UNIT_FIELDS, Wishes, check_forward_methods
from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.precision import mixed_precision_policy
from composer_dist.structure.names import ancestors
from composer_dist.structure.select import matching, select, spell
from composer_dist.structure.structure import Structure
from composer_dist.wording import listed, near_miss

_OURS = {
    "module": "it is the model",
    "init_sync": "use ParallelismConfig.sync",
    "forward_sync_buffers": "use DDPConfig.broadcast_buffers",
    "mixed_precision": "use DDPConfig.mixed_precision",
    **dict.fromkeys(
        ("device_ids", "output_device", "process_group", "device_mesh"), "the mesh determines it"
    ),
    **dict.fromkeys(("dim", "check_reduction"), "torch no longer uses it"),
}
"""Arguments of DDP that are set in another way."""
_ARGUMENTS = (
    "find_unused_parameters",
    "static_graph",
    "bucket_cap_mb",
    "gradient_as_bucket_view",
    "skip_all_reduce_unused_params",
)
"""Fields of DDPConfig that are arguments of DDP."""
_LOCAL_OPTIMIZERS = {"ZeroRedundancyOptimizer", "PostLocalSGDOptimizer", "DistributedOptimizer"}


@dataclass(frozen=True, kw_only=True)
class ReplicaPlan(FeaturePlan):
    """What DDP does for a model of which every rank holds a full copy."""

    arguments: Mapping[str, Any]
    """Of torch's DistributedDataParallel, by name."""
    hook: HookPlan | None
    reduce_dtype: torch.dtype | None
    """Dtype in which gradients are averaged without a hook; None is their own."""
    broadcast_buffers: bool
    sync_batch_norm: bool
    mp_policy: MixedPrecisionPolicy
    """The forward runs under autocast to its `param_dtype`."""
    averaged: tuple[str, ...]
    """First names of the parameters whose gradients are averaged while they are trainable."""
    nbytes: int
    """Size of these parameters in bytes."""
    ignored: tuple[str, ...]
    """First names of the tensors that are left to each rank."""
    idle: str | None
    """Why no gradient is averaged; None if gradients are."""
    plain: Mapping[str, str]
    """All parameters, each with the reason why it stays whole."""
    replicated: Mapping[str, str]
    """Modules whose parameters stay whole on every rank, each with the reason."""
    forward_methods: tuple[str, ...] = ()
    """Methods of the model that DDP treats like its forward."""
    warnings: tuple[str, ...] = ()
    units: tuple[()] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)

    def memory(self, rank: Rank) -> Callable[[StepEvent], Iterator[Change]]:
        trained = [info for name in self.averaged if (info := rank.tensors[name]).requires_grad]
        nbytes = 0 if self.idle else sum(info.nbytes for info in trained)

        def follow(event: StepEvent) -> Iterator[Change]:
            if event.moment == "begin":
                yield Change("communication", nbytes)

        return follow

    def communication(self, rank: Rank) -> BucketTraffic:
        infos = rank.tensors
        trained = [] if self.idle else [name for name in self.averaged if infos[name].requires_grad]
        sent = [one for one in infos.values() if one.kind == "buffer" and one.name not in self.ignored]
        cap = self.arguments["bucket_cap_mb"]
        limits = (int(cap * 2**20),) * 2 if cap else (FIRST_BUCKET, 25 << 20)
        hook = DTYPES.get(self.hook.names[0]) if self.hook and self.hook.names else None
        return BucketTraffic(
            gradients={name: (prod(infos[name].shape), infos[name].dtype) for name in trained},
            buffers=[(prod(one.shape), one.dtype) for one in sent] if self.broadcast_buffers else [],
            limits=limits,
            reduced=hook or self.reduce_dtype,
            searches=self.arguments["find_unused_parameters"] and not self.arguments["static_graph"],
            ranks=rank.sizes["dp_replicate"],
        )

    def explain(self, module: str = "") -> str:
        if module:
            return ""
        if self.idle:
            return f"No gradients are averaged, because {self.idle}."
        hook = f" by comm_hook={self.hook.spelled}" if self.hook else ""
        buffers = " Every forward starts with rank 0's buffers." if self.broadcast_buffers else ""
        return (
            f"DDP averages the gradients of {len(self.averaged)} parameters, {self.nbytes:,} bytes, in "
            f"buckets of {self.arguments['bucket_cap_mb'] or 25:g} MiB{hook}.{buffers}"
        )

    def notes(self) -> Iterator[str]:
        yield self.explain()
        yield from (f"left to each rank: {name}" for name in self.ignored)


def check_unprepared(structure: Structure, replicating: bool) -> None:
    """Refuse a model if DDP manages it, or a part of it, already.

    Args:
        replicating: whether DDP will manage it now; then FSDP2 must not shard any part of it either.
    """
    for name, module in structure.modules.items():
        label = name or "The model"
        if _torch.is_replicated(module):
            raise ParallelismTypeError(f"{label} is already replicated by DDP; prepare a model only once.")
        if isinstance(module, DistributedDataParallel):
            raise ParallelismTypeError(
                f"{label} is already wrapped in DistributedDataParallel; pass the wrapped module (.module)."
            )
        if replicating and isinstance(module, FSDPModule):
            raise ParallelismTypeError(f"{label} is already sharded by FSDP2, so DDP cannot replicate it.")
    known = prepared.of(structure.modules[""])
    if known is not None and known.mesh is not None and known.mesh.tp is not None:
        raise ParallelismValueError(prepared.ALREADY_SHARDED)
    tensors = structure.parameters.items() if replicating else ()
    if dtensors := [name for name, held in tensors if isinstance(held.get(), DTensor)]:
        raise ParallelismTypeError(
            f"{', '.join(dtensors[:4])} are DTensors, which DDP cannot replicate; leave out ddp=."
        )


def plan(structure: Structure, wishes: Wishes, sizes: Mapping[str, int]) -> ReplicaPlan | None:
    """Keep every parameter whole on every rank and let DDP average gradients; None where FSDP2 shards."""
    ddp = wishes.config.ddp
    if ddp is None:
        return None
    if others := [f"{name}={size}" for name, size in sizes.items() if size > 1 and name != "dp_replicate"]:
        raise ParallelismValueError(
            "ddp= replicates the whole model, so the mesh may have dp_replicate only, not "
            f"{', '.join(others)}. Leave out ddp=; FSDP2 can combine replication with other parallelism."
        )
    if isinstance(structure.modules[""], torch.jit.ScriptModule):
        raise ParallelismValueError(
            "torch.jit has compiled the whole model, and such a module does not run hooks. Put it into an "
            "ordinary one, such as nn.Sequential(model), and prepare that."
        )
    warnings = _without_effect(wishes)
    mp_policy = mixed_precision_policy(wishes.precision, ddp.mixed_precision)
    _check_dtypes(structure, mp_policy)
    _check_options(ddp.options or {})
    hook = plan_comm_hook(ddp, mp_policy.reduce_dtype)
    if ddp.averaging_period is not None and not (hook and hook.is_local_sgd):
        warnings.append(
            f"averaging_period={ddp.averaging_period} is ignored: only comm_hook='post_local_sgd' uses it."
        )
    modules, ignored = _ignored(structure, ddp)
    averaged = [name for name in structure.parameters if name not in ignored]
    infos = [structure.parameters[name].info for name in averaged]
    dtypes = {info.dtype for info in infos if info.requires_grad}
    idle = None if dtypes else "no parameter is trainable"
    idle = "DDPConfig.evaluate_only is set" if ddp.evaluate_only else idle
    whole = "DDP keeps it whole" + ("" if idle else " and averages its gradients")
    plain = {name: ignored.get(name, whole) for name in structure.parameters}
    for name in averaged:
        if not idle and not structure.parameters[name].info.requires_grad:
            plain[name] = "DDP keeps it whole; it is frozen"
    methods = tuple(wishes.config.forward_methods)
    check_forward_methods(methods, structure, [""])
    return ReplicaPlan(
        arguments={key: getattr(ddp, key) for key in _ARGUMENTS} | dict(ddp.options or {}),
        hook=hook,
        broadcast_buffers=ddp.broadcast_buffers,
        sync_batch_norm=ddp.sync_batch_norm,
        mp_policy=mp_policy,
        reduce_dtype=None if dtypes == {mp_policy.reduce_dtype} else mp_policy.reduce_dtype,
        averaged=tuple(averaged),
        nbytes=sum(info.nbytes for info in infos),
        ignored=tuple(ignored),
        idle=idle,
        plain=plain,
        replicated={**modules, "": whole},
        forward_methods=methods,
        warnings=tuple(warnings),
    )


def check_replica(
    replica: ReplicaPlan, structure: Structure, optimizers: Sequence[Optimizer], mesh: Mesh
) -> None:
    """Check what depends on the device or the optimizers."""
    synced = [name for name, module in structure.modules.items() if isinstance(module, SyncBatchNorm)]
    if replica.sync_batch_norm:
        synced += [name for name, _ in find_batch_norms(structure.modules[""])]
    if synced and mesh.device_type == "cpu":
        raise ParallelismValueError(
            f"SyncBatchNorm ({listed(synced, 4)}) runs on accelerators only; on CPU leave out "
            "sync_batch_norm, or call revert_sync_batch_norm."
        )
    if not (replica.hook and replica.hook.is_local_sgd) or replica.idle:
        return
    if not optimizers:
        raise ParallelismValueError(
            "comm_hook='post_local_sgd' averages parameters after the optimizer's step; pass optimizer=."
        )
    for optimizer in optimizers:
        if _LOCAL_OPTIMIZERS & {cls.__name__ for cls in type(optimizer).__mro__}:
            raise ParallelismValueError(
                f"comm_hook='post_local_sgd' cannot average the parameters of a {type(optimizer).__name__}, "
                "because it is distributed; use an ordinary optimizer."
            )


def stays(structure: Structure, device: torch.device) -> bool:
    """Whether the model keeps its parameter objects: all are contiguous and on `device`."""
    parameters = [held.get() for held in structure.parameters.values()]
    return all(p.device == device and p.is_contiguous() for p in parameters)


def _without_effect(wishes: Wishes) -> list[str]:
    config = wishes.config
    found = [
        f"{source} sets {key}"
        for fields in wishes.rules.values()
        for key, (_, source) in fields.items()
        if key in {"shard", "skippable", "tp", *UNIT_FIELDS}
    ]
    others = {"tp": config.tp, "fsdp2": config.fsdp2, "a wrap policy": wishes.wrap_policy}
    found += [f"{name} is given" for name, value in others.items() if value is not None]
    texts = [f"{what}, which has no effect under DDP (ddp=); leave it out." for what in dict.fromkeys(found)]
    return wishes.tolerated(texts)


def _check_dtypes(structure: Structure, policy: MixedPrecisionPolicy) -> None:
    wanted, half = policy.param_dtype, (torch.bfloat16, torch.float16)
    names = [name for name, held in structure.parameters.items() if held.info.dtype in half]
    if names and wanted is not None and wanted not in half:
        raise ParallelismValueError(
            f"DDP cannot compute in {wanted} with {listed(names, 4)} in half precision: autocast only casts "
            "to lower precision. Convert them, or leave out ddp= (FSDP2 casts gathered parameters)."
        )


def _check_options(options: Mapping[str, Any]) -> None:
    fields = DDPConfig.__dataclass_fields__
    known = [key for key in signature(DistributedDataParallel).parameters if key not in {*_OURS, *fields}]
    for key in options:
        if key in _OURS:
            raise ParallelismValueError(f"DDPConfig.options cannot have {key!r}: {_OURS[key]}.")
        if key not in known:
            where = " It is a field of DDPConfig." if key in fields else near_miss(key, known)
            raise ParallelismValueError(
                f"DDPConfig.options has {key!r}, which is not an option of this torch's "
                f"DistributedDataParallel; valid options: {', '.join(known)}.{where}"
            )


def _ignored(structure: Structure, ddp: DDPConfig) -> tuple[dict[str, str], dict[str, str]]:
    """Modules, and first names of tensors, that are left to each rank, with the reason."""
    modules: dict[str, str] = {}
    tensors: dict[str, str] = {}
    first = {name: held.info.name for held in structure.tensors.values() for name in held.info.names}
    matches = ddp.ignored if isinstance(ddp.ignored, (list, tuple)) else [ddp.ignored]
    for match in [Rule(match).match for match in matches]:  # a rule refuses other types
        reason = f"DDPConfig.ignored={spell(match)} leaves it to each rank"
        below = select(match, structure.modules)
        named = _select_names(match, first)
        if not below and not named:
            hint = near_miss(match, {*structure.modules, *first}) if isinstance(match, str) else ""
            raise ParallelismValueError(f"DDPConfig.ignored={spell(match)} matches nothing.{hint}")
        modules.update(dict.fromkeys(below, reason))
        tensors.update({first[name]: reason for name in named})
    listed = getattr(structure.modules[""], "_ddp_params_and_buffers_to_ignore", ())
    reason = "_ddp_params_and_buffers_to_ignore leaves it to each rank"
    tensors.update({first[name]: reason for name in listed if name in first})
    for name, held in structure.tensors.items():
        homes = [next((m for m in ancestors(o) if m in modules), None) for o in held.info.owners]
        if homes[0] is not None and None not in homes:  # a tie to a module outside is averaged
            tensors.setdefault(name, modules[homes[0]])
    return modules, {name: tensors[name] for name in structure.tensors if name in tensors}


def _select_names(match: object, names: Mapping[str, str]) -> Iterator[str] | list[str]:
    if isinstance(match, str) and not match.startswith("re:"):
        return [match] if match in names else []
    if isinstance(match, (str, re.Pattern)):
        pattern = re.compile(match[3:]) if isinstance(match, str) else match
        return matching(pattern, names)
    return []
