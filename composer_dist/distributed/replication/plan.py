"""The plan of a model that every rank holds whole, and whose gradients DDP averages."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
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
from composer_dist.distributed.feature_plan import FeaturePlan
from composer_dist.distributed.mesh.mesh import Mesh
from composer_dist.distributed.replication.batch_norm import find_batch_norms
from composer_dist.distributed.replication.hooks import LOCAL_SGD, check_comm_hook, innermost, spell
from composer_dist.distributed.wishes import UNIT_FIELDS, Wishes, check_forward_methods
from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.precision import mixed_precision_policy
from composer_dist.structure.names import ancestors
from composer_dist.structure.select import select
from composer_dist.structure.select import spell as spell_match
from composer_dist.structure.structure import Structure
from composer_dist.wording import near_miss

_OURS = {
    "module": "it is the model",
    "init_sync": "ParallelismConfig.sync says whose weights count",
    "forward_sync_buffers": "it is DDPConfig.broadcast_buffers",
    "mixed_precision": "it is DDPConfig.mixed_precision",
    **dict.fromkeys(("device_ids", "output_device", "process_group", "device_mesh"), "the mesh says it"),
    **dict.fromkeys(("dim", "check_reduction"), "torch does not use it any more"),
}
"""Arguments of DDP that are settled elsewhere."""
_LOCAL_OPTIMIZERS = {"ZeroRedundancyOptimizer", "PostLocalSGDOptimizer", "DistributedOptimizer"}


@dataclass(frozen=True, kw_only=True)
class ReplicaPlan(FeaturePlan):
    """What DDP does for a model that every rank holds whole."""

    ddp: DDPConfig
    mp_policy: MixedPrecisionPolicy
    """Autocast's dtype is `param_dtype`."""
    reduce_dtype: torch.dtype | None
    """What gradients are averaged in; None is their own dtype, or the `comm_hook`'s affair."""
    averaged: tuple[str, ...]
    """First names of the parameters whose gradients are averaged while they are trainable."""
    nbytes: int
    """Their size."""
    ignored: tuple[str, ...]
    """First names of the tensors that are left to each rank."""
    idle: str | None
    """Why no gradient is averaged at all, if so."""
    plain: Mapping[str, str]
    """All parameters, each with the reason why it stays whole."""
    replicated: Mapping[str, str]
    """Modules whose parameters stay whole on every rank, each with the reason."""
    forward_methods: tuple[str, ...] = ()
    """Methods of the model around which DDP works as around its forward."""
    warnings: tuple[str, ...] = ()
    units: tuple[()] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)

    def explain(self, module: str = "") -> str:
        """In words, for the root."""
        if module:
            return ""
        if self.idle:
            return f"No gradients are averaged, because {self.idle}."
        hook = f" by comm_hook={spell(self.ddp)}" if self.ddp.comm_hook is not None else ""
        buffers = " Buffers are rank 0's in every forward." if self.ddp.broadcast_buffers else ""
        return (
            f"DDP averages the gradients of {len(self.averaged)} parameters, {self.nbytes:,} bytes, in "
            f"buckets of {self.ddp.bucket_cap_mb or 25:g} MiB{hook}.{buffers}"
        )

    def notes(self) -> Iterator[str]:
        """What the plan as text says."""
        yield self.explain()
        yield from (f"left to each rank: {name}" for name in self.ignored)

    def facts(self) -> dict[str, Any]:
        """The plan in plain types."""
        return {
            "ddp": {key: str(value) for key, value in vars(self.ddp).items() if "comm_hook" not in key},
            "comm_hook": [spell(self.ddp), str(dict(self.ddp.comm_hook_options or {}))],
            "mixed_precision": str(self.mp_policy),
            "averaged": list(self.averaged),
            "ignored": list(self.ignored),
            "idle": self.idle,
            "forward_methods": list(self.forward_methods),
        }


def check_unprepared(structure: Structure, replicating: bool) -> None:
    """Refuse a model that DDP manages already, or a part of which it does.

    Args:
        replicating: whether DDP is to manage it now, which parts sharded by FSDP2 forbid as well.

    Raises:
        ParallelismTypeError: names the modules.
    """
    for name, module in structure.modules.items():
        label = name or "The model"
        if _torch.is_replicated(module):
            raise ParallelismTypeError(f"{label} is replicated by DDP already; prepare a model once.")
        if isinstance(module, DistributedDataParallel):
            raise ParallelismTypeError(
                f"{label} is wrapped in DistributedDataParallel already; hand in what it wraps (.module)."
            )
        if replicating and isinstance(module, FSDPModule):
            raise ParallelismTypeError(f"{label} is sharded by FSDP2 already, so DDP cannot replicate it.")
    tensors = structure.parameters.items() if replicating else ()
    if dtensors := [name for name, held in tensors if isinstance(held.get(), DTensor)]:
        raise ParallelismTypeError(
            f"{', '.join(dtensors[:4])} are DTensors, which DDP cannot replicate; leave out ddp=."
        )


def plan(structure: Structure, wishes: Wishes, sizes: Mapping[str, int]) -> ReplicaPlan | None:
    """Every parameter stays whole on every rank, and DDP averages gradients; None where FSDP2 shards.

    Raises:
        ParallelismValueError: a mesh that does more than replicate, options that do not exist or do not go
            together, and (`strict`) ones without effect.
    """
    ddp = wishes.config.ddp
    if ddp is None:
        return None
    if others := [f"{name}={size}" for name, size in sizes.items() if size > 1 and name != "dp_replicate"]:
        raise ParallelismValueError(
            f"ddp= replicates the whole model, so the mesh may have dp_replicate only, not "
            f"{', '.join(others)}. Leave out ddp=: FSDP2 shards, and replicates beside other parallelism."
        )
    warnings = _without_effect(wishes)
    mp_policy = mixed_precision_policy(wishes.precision, ddp.mixed_precision)
    _check_dtypes(structure, mp_policy)
    _check_options(ddp.options or {})
    warnings += check_comm_hook(ddp, mp_policy.reduce_dtype)
    modules, ignored = _ignored(structure, ddp)
    averaged = [name for name in structure.parameters if name not in ignored]
    infos = [structure.parameters[name].info for name in averaged]
    dtypes = {info.dtype for info in infos if info.requires_grad}
    idle = None if dtypes else "no parameter is trainable"
    idle = "DDPConfig.evaluate_only says so" if ddp.evaluate_only else idle
    whole = "DDP keeps it whole" + ("" if idle else " and averages its gradients")
    plain = {name: ignored.get(name, whole) for name in structure.parameters}
    for name in averaged:
        if not idle and not structure.parameters[name].info.requires_grad:
            plain[name] = "DDP keeps it whole; it is frozen"
    methods = tuple(wishes.config.forward_methods)
    check_forward_methods(methods, structure, [""])
    return ReplicaPlan(
        ddp=ddp,
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
    """Check what depends on the device or the optimizers, before anything is changed.

    Raises:
        ParallelismValueError: synchronized batch norms without an accelerator; post-local SGD without an
            optimizer, or with one that shards its state.
    """
    synced = [name for name, module in structure.modules.items() if isinstance(module, SyncBatchNorm)]
    if replica.ddp.sync_batch_norm:
        synced += [name for name, _ in find_batch_norms(structure.modules[""])]
    if synced and mesh.device_type == "cpu":
        raise ParallelismValueError(
            f"SyncBatchNorm ({', '.join(name or 'the root' for name in synced[:4])}) runs on accelerators "
            "only; on CPU leave out sync_batch_norm, or call revert_sync_batch_norm."
        )
    if innermost(replica.ddp) != LOCAL_SGD or replica.idle:
        return
    if not optimizers:
        raise ParallelismValueError(
            "comm_hook='post_local_sgd' averages parameters after the optimizer's step; pass optimizer=."
        )
    for optimizer in optimizers:
        if _LOCAL_OPTIMIZERS & {cls.__name__ for cls in type(optimizer).__mro__}:
            raise ParallelismValueError(
                f"comm_hook='post_local_sgd' cannot average what a {type(optimizer).__name__} moves, which "
                "is distributed itself; use an ordinary optimizer."
            )


def stays(structure: Structure, device: torch.device) -> bool:
    """Whether the model keeps every parameter object: all are on `device`, and as they will be delivered."""
    parameters = [held.get() for held in structure.parameters.values()]
    return all(p.device.type == device.type and p.is_contiguous() for p in parameters)


def _without_effect(wishes: Wishes) -> list[str]:
    """Options that only apply to sharding: an error if `strict`, otherwise warnings."""
    config = wishes.config
    found = [
        f"{source} sets {key}"
        for fields in wishes.rules.values()
        for key, (_, source) in fields.items()
        if key in {"shard", "skippable", "tp", *UNIT_FIELDS}
    ]
    found += ["tp is given"] if config.tp is not None else []
    found += ["fsdp2 is given"] if config.fsdp2 is not None else []
    found += ["a wrap policy is given"] if wishes.wrap_policy is not None else []
    texts = [f"{what}, which has no effect under DDP (ddp=); leave it out." for what in dict.fromkeys(found)]
    if texts and config.strict:
        raise ParallelismValueError("\n".join(texts))
    return texts


def _check_dtypes(structure: Structure, policy: MixedPrecisionPolicy) -> None:
    wanted = policy.param_dtype
    if wanted is None or wanted in (torch.bfloat16, torch.float16):
        return
    half = (torch.bfloat16, torch.float16)
    names = [name for name, held in structure.parameters.items() if held.info.dtype in half]
    if names:
        raise ParallelismValueError(
            f"DDP cannot compute in {wanted} with {', '.join(names[:4])} in half precision: autocast "
            "goes down only. Convert them, or leave out ddp= (FSDP2 casts what it gathers)."
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
                f"DDPConfig.options has {key!r}, which this torch's DistributedDataParallel does not take "
                f"from there; it takes {', '.join(known)}.{where}"
            )


def _ignored(structure: Structure, ddp: DDPConfig) -> tuple[dict[str, str], dict[str, str]]:
    """Modules, and first names of tensors, that are left to each rank, with the reason."""
    modules: dict[str, str] = {}
    tensors: dict[str, str] = {}
    first = {name: held.info.name for held in structure.tensors.values() for name in held.info.names}
    matches = ddp.ignored if isinstance(ddp.ignored, (list, tuple)) else [ddp.ignored]
    for match in [Rule(match).match for match in matches]:  # a rule refuses what nothing matches by
        reason = f"DDPConfig.ignored={spell_match(match)} leaves it to each rank"
        below = select(match, structure.modules)
        named = _select_names(match, first)
        if not below and not named:
            hint = near_miss(match, {*structure.modules, *first}) if isinstance(match, str) else ""
            raise ParallelismValueError(f"DDPConfig.ignored={spell_match(match)} matches nothing.{hint}")
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
        return [name for name in names if pattern.fullmatch(name)]
    return []
