"""The plan of FSDP2: which parameters each unit gathers, and how; and what stays whole.

Rules take precedence over the wrap policy, and the wrap policy over the configuration.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.distributed.feature_plan import FeaturePlan
from composer_dist.distributed.mesh.dimensions import roles
from composer_dist.distributed.sharding.assign_units import (
    Assignment,
    Draft,
    Skippable,
    assign,
    plan_skippable,
)
from composer_dist.distributed.sharding.choose_units import choose_units
from composer_dist.distributed.sharding.codecs import check_codecs
from composer_dist.distributed.wishes import UNIT_FIELDS, Wishes, check_forward_methods
from composer_dist.errors import ParallelismValueError
from composer_dist.precision import mixed_precision_policy
from composer_dist.structure.blocks import structural_units
from composer_dist.structure.names import ancestors
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
    """None, or in which kind of host memory the shards live: "pinned", "pageable", or "auto", which is pinned
    where there is an accelerator."""
    reason: str

    @property
    def name(self) -> str:
        """The first module's name."""
        return self.modules[0]


@dataclass(frozen=True, kw_only=True)
class ShardingPlan(FeaturePlan):
    """Everything that FSDP2, and what this library adds around it, will do to a model."""

    units: tuple[Unit, ...]
    """In the order in which they are applied: outer before inner."""
    plain: Mapping[str, str]
    """Parameters that stay whole on every rank, each with the reason."""
    reasons: Mapping[str, str]
    """The modules of the units, each with the reason why it is in one."""
    skipped: Mapping[str, str]
    """Modules that were chosen but did not become units, each with the reason."""
    replicated: Mapping[str, str]
    """Modules whose parameters stay whole on every rank, each with the reason."""
    blocks: tuple[str, ...]
    """The innermost units: what is recomputed and compiled by default."""
    skippable: tuple[Skippable, ...] = ()
    """Modules with trainable parameters that ranks may skip."""
    forward_methods: tuple[str, ...] = ()
    """Methods in which the units that have them gather too."""
    check_order: bool = False
    """Whether the ranks compare, before each collective of a unit, that all are at the same one."""
    warnings: tuple[str, ...] = ()
    parameter_units: Mapping[str, str] = field(init=False, repr=False)
    """Every sharded parameter's first name to its unit's."""

    def __post_init__(self) -> None:
        owners = {name: unit.name for unit in self.units for name in unit.parameters}
        object.__setattr__(self, "parameter_units", owners)

    def explain(self, module: str) -> str:
        """What the unit that `module` leads or belongs to gathers, in words."""
        return " ".join(
            f"It gathers {len(unit.parameters)} parameter{'s' * (len(unit.parameters) != 1)}, "
            f"{unit.nbytes:,} bytes; reshard_after_forward={unit.reshard_after_forward}."
            for unit in self.units
            if module in unit.modules
        )

    def notes(self) -> Iterator[str]:
        """Lines for the plan as text, beside the table of units."""
        yield from (f"replicated: {name} ({reason})" for name, reason in self.plain.items())


def plan(
    structure: Structure, wishes: Wishes, sizes: Mapping[str, int], cut: Mapping[str, int]
) -> ShardingPlan | None:
    """Decide which unit manages which parameter, and how; None where DDP replicates the model.

    Args:
        cut: parameters that lie on the tensor-parallel mesh, each with the parts that it is cut into.

    Raises:
        ParallelismError: see `choose_units`, `assign`, `check_forward_methods` and `check_codecs`;
            a mesh that FSDP2 cannot use; rules without effect.
    """
    if wishes.config.ddp is not None:
        return None
    mesh = wishes.mesh
    if isinstance(mesh, DeviceMesh) and {"dp_replicate", "dp_shard"} & roles(mesh).keys() == {"dp_replicate"}:
        raise ParallelismValueError(
            "The mesh has dp_replicate and no dp_shard, which FSDP2 cannot replicate over; add a dimension "
            "dp_shard of size 1, or replicate by DDP (ddp=DDPConfig())."
        )
    choices = choose_units(structure, wishes)
    shards = sizes["dp_shard"] * sizes["cp"]
    assignment = assign(structure, choices, shards)
    idle = idle_rules(wishes, assignment)
    blocks = innermost(assignment) or tuple(name for name, _ in structural_units(structure))
    units = tuple(
        _unit(group, structure, wishes, shards, is_last=group.modules == [*blocks[-1:]])
        for group in assignment.groups
    )
    methods = tuple(wishes.config.forward_methods)
    check_forward_methods(methods, structure, [name for unit in units for name in unit.modules])
    skippable = tuple(plan_skippable(structure, wishes, assignment))
    reasons = {
        name: choices.units.get(name, group.choice).reason
        for group in assignment.groups
        for name in group.modules
    }
    found = ShardingPlan(
        units=units,
        plain=assignment.plain,
        reasons=reasons,
        skipped=assignment.skipped,
        replicated=choices.plain,
        blocks=blocks,
        skippable=skippable,
        forward_methods=methods,
        check_order=_checks_order(wishes, sizes),
        warnings=(*choices.warnings, *assignment.warnings, *idle),
    )
    if sizes["tp"] > 1:
        found = _with_tensor_parallel(found, structure, sizes, cut, mesh)
    resharded = {name: u.reshard_after_forward for u in found.units for name in u.parameters}
    check_codecs(structure, resharded, sizes, cut)
    return found


def _checks_order(wishes: Wishes, sizes: Mapping[str, int]) -> bool:
    wanted = wishes.config.check_order
    alone = all(size == 1 for size in sizes.values())
    return not alone and (wishes.device_type == "cpu" if wanted == "auto" else wanted)


def innermost(assignment: Assignment) -> tuple[str, ...]:
    """The blocks of the model: units below the root that contain no other unit of their own kind."""
    names = [name for group in assignment.groups for name in group.modules if name and not group.split]
    outer = {above for name in names for above in ancestors(name) if above != name}
    return tuple(name for name in names if name not in outer)


def _unit(group: Draft, structure: Structure, wishes: Wishes, shards: int, is_last: bool) -> Unit:
    """A unit with everything settled.

    Args:
        shards: ranks that share each parameter.
        is_last: whether it is the last block of the model.

    Raises:
        ParallelismValueError: `reshard_after_forward` does not divide `shards`, or a mixed precision that
            does not exist.
    """
    options, fsdp2 = group.choice.options, wishes.config.fsdp2 or FSDP2Config()
    mixed = options.get("mixed_precision", fsdp2.mixed_precision)
    return Unit(
        modules=tuple(group.modules),
        parameters=tuple(group.parameters),
        nbytes=sum(structure.tensors[name].info.nbytes for name in group.parameters),
        reshard_after_forward=_reshard(group, fsdp2, shards, is_last),
        mp_policy=options.get("mp_policy") or mixed_precision_policy(wishes.precision, mixed),
        offload=_offload(options, fsdp2),
        reason=group.choice.reason,
    )


def _reshard(group: Draft, fsdp2: FSDP2Config, shards: int, is_last: bool) -> bool | int:
    """Whether a unit is freed after forward.

    By default the root and the last block are not: their backward starts at once and would only gather
    them again (torch does this for the root, torchtitan for both).
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


def _with_tensor_parallel(
    plan: ShardingPlan, structure: Structure, sizes: Mapping[str, int], cut: Mapping[str, int], mesh: object
) -> ShardingPlan:
    """What FSDP2 manages beside tensor parallelism.

    Units gather what this rank has of cut parameters. On a single data-parallel rank there are none at
    all, unless they cast or offload.

    Raises:
        ParallelismValueError: a cut parameter that is in no unit, so that nobody would reduce its gradient;
            casts or offload on a mesh that FSDP2 has no dimension of.
    """
    alone = all(size == 1 for name, size in sizes.items() if name != "tp")
    if alone and all(unit.mp_policy == MixedPrecisionPolicy() and not unit.offload for unit in plan.units):
        why = "tensor-parallel ranks alone share the model, and the matrices are cut among them"
        plain = {name: why for name in structure.parameters if name not in cut}
        skipped = {**plan.skipped, **dict.fromkeys(plan.reasons, why)}
        return replace(plan, units=(), plain=plain, reasons={}, skipped=skipped)
    if isinstance(mesh, DeviceMesh) and roles(mesh).keys() == {"tp"}:
        raise ParallelismValueError(
            "Mixed precision and offload are FSDP2's, and the mesh has only tensor-parallel ranks; give it a "
            "dimension dp_shard of size 1, or leave precision and offload out."
        )
    outside = [name for name in cut if name in plan.plain]
    if outside and not alone:
        raise ParallelismValueError(
            f"{', '.join(outside)} would be cut by tensor parallelism, but no unit reduces the gradients "
            f"over the data-parallel ranks: {plan.plain[outside[0]]}. Let a unit have it, or leave it "
            "whole with Rule(..., tp='replicate')."
        )

    def gathered(name: str) -> int:
        return -(-structure.tensors[name].info.nbytes // cut.get(name, 1))

    units = tuple(replace(unit, nbytes=sum(map(gathered, unit.parameters))) for unit in plan.units)
    return replace(plan, units=units, plain={n: why for n, why in plan.plain.items() if n not in cut})


def idle_rules(wishes: Wishes, assignment: Assignment) -> list[str]:
    """Rules with a field that only units follow, none of whose matches is a unit.

    Raises:
        ParallelismValueError: there are some, and `strict`.
    """
    units = {name for group in assignment.groups for name in group.modules}
    idle: dict[tuple[str, str], list[str]] = {}
    for key in UNIT_FIELDS:
        for name, (_, source) in wishes.ruled(key).items():
            idle.setdefault((source, key), []).append(name)
    texts = [
        f"{source} sets {key}, but {', '.join(names[:4])} "
        f"{'is not a unit' if len(names) == 1 else 'are not units'}; add shard=True, or leave it out."
        for (source, key), names in idle.items()
        if units.isdisjoint(names)
    ]
    if texts and wishes.config.strict:
        raise ParallelismValueError("\n".join(texts))
    return texts
