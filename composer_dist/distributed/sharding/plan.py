"""What each unit does with its parameters: when it frees them, their dtype on the way, where they live."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.distributed.mesh.dimensions import roles
from composer_dist.distributed.sharding.choose import UNIT_FIELDS, Choices
from composer_dist.distributed.sharding.units import Assignment, Group
from composer_dist.distributed.tensor_parallel.plan import TensorParallelPlan
from composer_dist.errors import ParallelismValueError
from composer_dist.precision import Precision, mixed_precision_policy
from composer_dist.structure.structure import Structure


@dataclass(frozen=True)
class Unit:
    """Modules whose parameters are gathered, and whose gradients are reduced, together."""

    modules: tuple[str, ...]
    """Names of the modules, "" being the root; more than one where a tie joins them."""
    parameters: tuple[str, ...]
    """First names of the parameters it manages."""
    nbytes: int
    """Size of the gathered parameters in bytes, in their own dtypes."""
    reshard_after_forward: bool | int
    mp_policy: MixedPrecisionPolicy
    offload: str | None
    """None, or where the shards live in host memory: "auto", "pinned" or "pageable"."""
    reason: str

    @property
    def name(self) -> str:
        """The first module's name."""
        return self.modules[0]

    def to_dict(self) -> dict[str, Any]:
        """The unit in plain types."""
        return {
            "modules": list(self.modules),
            "parameters": list(self.parameters),
            "nbytes": self.nbytes,
            "reshard_after_forward": self.reshard_after_forward,
            "mixed_precision": str(self.mp_policy),
            "offload": self.offload,
            "reason": self.reason,
        }


def plan_unit(
    group: Group,
    structure: Structure,
    fsdp2: FSDP2Config,
    shards: int,
    precision: str | Precision | None,
    is_last: bool,
) -> Unit:
    """A unit with everything settled: a rule's word first, then the policy's, then the configuration's.

    Args:
        group: the modules, parameters and options.
        structure: the model's.
        fsdp2: what holds where the options are silent.
        shards: ranks that share each parameter.
        precision: see `composer_dist.precision`.
        is_last: whether it is the last block of the model.

    Raises:
        ParallelismValueError: `reshard_after_forward` does not divide `shards`, or a mixed precision that
            does not exist.
    """
    options = group.choice.options
    mp_policy = options.get("mp_policy") or mixed_precision_policy(
        precision, options.get("mixed_precision", fsdp2.mixed_precision)
    )
    return Unit(
        modules=tuple(group.modules),
        parameters=tuple(group.parameters),
        nbytes=sum(structure.tensors[name].info.nbytes for name in group.parameters),
        reshard_after_forward=_reshard(group, fsdp2, shards, is_last),
        mp_policy=mp_policy,
        offload=_offload(options, fsdp2),
        reason=group.choice.reason,
    )


def _reshard(group: Group, fsdp2: FSDP2Config, shards: int, is_last: bool) -> bool | int:
    """Whether a unit is freed after forward.

    Where nobody has said otherwise the root and the last block are not: their backward comes at once,
    and they would be gathered again for nothing (torch does so for the root, torchtitan for both).
    """
    wanted: bool | int = group.choice.options.get("reshard_after_forward", fsdp2.reshard_after_forward)
    if isinstance(wanted, bool):
        by_default = "reshard_after_forward" not in group.choice.options
        return wanted and not (by_default and (is_last or group.modules == [""]))
    if wanted < 1 or shards % wanted:
        raise ParallelismValueError(
            f"reshard_after_forward={wanted} for {group.name} must be True, False, or a "
            f"number that divides the {shards} ranks that share each parameter."
        )
    return wanted == shards if wanted in {1, shards} else wanted


def _offload(options: Mapping[str, Any], fsdp2: FSDP2Config) -> str | None:
    policy = options.get("offload_policy")
    if isinstance(policy, CPUOffloadPolicy):
        return "pinned" if policy.pin_memory else "pageable"
    wanted = False if policy else options.get("offload", fsdp2.cpu_offload)
    if wanted is True:
        # A rule says whether, and the configuration how.
        return fsdp2.cpu_offload if isinstance(fsdp2.cpu_offload, str) else "auto"
    return wanted or None


def with_tensor_parallel(
    assignment: Assignment,
    units: Sequence[Unit],
    plan: TensorParallelPlan,
    structure: Structure,
    sizes: Mapping[str, int],
    mesh: DeviceMesh | None,
) -> tuple[Assignment, tuple[Unit, ...]]:
    """What is left to FSDP2 beside tensor parallelism.

    Units gather what this rank has of cut parameters. On a single data-parallel rank there are none at
    all, unless they cast or offload.

    Args:
        mesh: the user's own, if there is one.

    Raises:
        ParallelismValueError: a cut parameter that is in no unit, so that nobody would reduce its gradient;
            casts or offload on a mesh that FSDP2 has no dimension of.
    """
    alone = all(size == 1 for name, size in sizes.items() if name != "tp")
    if alone and all(unit.mp_policy == MixedPrecisionPolicy() and not unit.offload for unit in units):
        why = "tensor-parallel ranks alone share the model, and the matrices are cut among them"
        plain = {name: why for name in structure.parameters if name not in plan.parameters}
        reason = {name: why for group in assignment.groups for name in group.modules}
        return replace(assignment, groups=(), plain=plain, skipped=dict(assignment.skipped) | reason), ()
    if mesh is not None and roles(mesh).keys() == {"tp"}:
        raise ParallelismValueError(
            "Mixed precision and offload are FSDP2's, and the mesh has only tensor-parallel ranks; give it a "
            "dimension dp_shard of size 1, or leave precision and offload out."
        )
    outside = [name for name in plan.parameters if name in assignment.plain]
    if outside and not alone:
        raise ParallelismValueError(
            f"{', '.join(outside)} would be cut by tensor parallelism, but no unit reduces the gradients "
            f"over the data-parallel ranks: {assignment.plain[outside[0]]}. Let a unit have it, or leave it "
            "whole with Rule(..., tp='replicate')."
        )

    def gathered(name: str) -> int:
        nbytes = structure.tensors[name].info.nbytes
        return -(-nbytes // plan.size) if name in plan.cuts else nbytes

    sized = (replace(unit, nbytes=sum(map(gathered, unit.parameters))) for unit in units)
    plain = {name: why for name, why in assignment.plain.items() if name not in plan.parameters}
    return replace(assignment, plain=plain), tuple(sized)


def idle_rules(choices: Choices, assignment: Assignment, strict: bool) -> list[str]:
    """Rules with a field that only units follow, none of whose matches is a unit.

    Raises:
        ParallelismValueError: there are some, and `strict`.
    """
    units = {name for group in assignment.groups for name in group.modules}
    idle: dict[tuple[str, str], list[str]] = {}
    for name, fields in choices.rules.items():
        for key in UNIT_FIELDS:
            if key in fields:
                idle.setdefault((fields[key][1], key), []).append(name)
    texts = [
        f"{source} sets {key}, but {', '.join(names[:4])} {'is' if len(names) == 1 else 'are'} no unit; "
        "add shard=True, or leave it out."
        for (source, key), names in idle.items()
        if units.isdisjoint(names)
    ]
    if texts and strict:
        raise ParallelismValueError("\n".join(texts))
    return texts
