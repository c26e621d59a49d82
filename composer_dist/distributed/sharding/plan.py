"""The plan of FSDP2: which parameters each unit gathers, and how; and which stay whole.

Rules take precedence over the wrap policy, and the wrap policy over the configuration.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from composer_dist import _torch
from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.distributed.feature_plan import FeaturePlan, Rank
from composer_dist.distributed.mesh.dimensions import FLATTENED, roles
from composer_dist.distributed.mesh.layout import Layout, padded_numel
from composer_dist.distributed.moving.memory import pins
from composer_dist.distributed.sharding.assign_units import (
    Assignment,
    Draft,
    Skippable,
    assign,
    plan_skippable,
)
from composer_dist.distributed.sharding.choose_units import choose_units
from composer_dist.distributed.sharding.codecs import check_codecs
from composer_dist.distributed.sharding.communication import UnitTraffic, averaged_gradients, followed_buffers
from composer_dist.distributed.sharding.memory import UnitMemory, UnitSizes
from composer_dist.distributed.wishes import UNIT_FIELDS, Wishes, check_forward_methods
from composer_dist.errors import ParallelismValueError
from composer_dist.precision import mixed_precision_policy
from composer_dist.structure.blocks import structural_units
from composer_dist.structure.names import ancestors
from composer_dist.structure.structure import Structure
from composer_dist.wording import listed

_BATCH_NORM = "each rank normalizes its own part of the batch, and the running statistics follow rank 0's"


@dataclass(frozen=True)
class Unit:
    """Modules whose parameters are gathered, and whose gradients are reduced, together."""

    modules: tuple[str, ...]
    """Names of the modules, "" being the root; several if a tie joins them."""
    parameters: tuple[str, ...]
    """First names of the parameters it manages."""
    nbytes: int
    """Size of the gathered parameters in bytes, in their own dtypes."""
    reshard_after_forward: bool | int
    mp_policy: MixedPrecisionPolicy
    offload: str | None
    """The kind of host memory for the shards, "pinned" or "pageable"; None keeps them on the device."""
    reason: str

    @property
    def name(self) -> str:
        """The first module's name."""
        return self.modules[0]


@dataclass(frozen=True, kw_only=True)
class ShardingPlan(FeaturePlan):
    """What FSDP2, and this library's hooks, will do to a model."""

    units: tuple[Unit, ...]
    """In the order of application: outer before inner."""
    plain: Mapping[str, str]
    """Parameters that stay whole on every rank, each with the reason."""
    reasons: Mapping[str, str]
    """The modules of the units, each with the reason."""
    skipped: Mapping[str, str]
    """Modules that were chosen but did not become units, each with the reason."""
    replicated: Mapping[str, str]
    """Modules whose parameters stay whole on every rank, each with the reason."""
    blocks: tuple[str, ...]
    """The innermost units, which are recomputed and compiled by default."""
    skippable: tuple[Skippable, ...] = ()
    """Modules with trainable parameters that ranks may skip."""
    forward_methods: tuple[str, ...] = ()
    """Further methods in which units gather their parameters."""
    batch_norms: tuple[str, ...] = ()
    """Modules whose running statistics follow rank 0's, if several ranks train on different data."""
    check_order: bool = False
    """Whether the ranks compare their units before each collective."""
    state_dict_type: Literal["sharded", "full"] = "sharded"
    """The form in which a `CheckpointSaver` saves the run."""
    warnings: tuple[str, ...] = ()
    parameter_units: Mapping[str, str] = field(init=False, repr=False)
    """The first name of every sharded parameter to the name of its unit."""

    def __post_init__(self) -> None:
        owners = {name: unit.name for unit in self.units for name in unit.parameters}
        object.__setattr__(self, "parameter_units", owners)

    def explain(self, module: str) -> str:
        texts = [
            f"It gathers {len(unit.parameters)} parameter{'s' * (len(unit.parameters) != 1)}, "
            f"{unit.nbytes:,} bytes; reshard_after_forward={unit.reshard_after_forward}."
            for unit in self.units
            if module in unit.modules
        ]
        if module in self.batch_norms:
            texts.append(f"It is a batch norm: {_BATCH_NORM}.")
        return " ".join(texts)

    def memory(self, rank: Rank) -> UnitMemory:
        sizes = {unit.name: _sizes(unit, rank) for unit in self.units}
        return UnitMemory(sizes, rank.at.shards, staged=rank.device_type == "cpu")

    def communication(self, rank: Rank) -> UnitTraffic:
        sizes, infos = rank.sizes, rank.tensors.values()
        both = sizes["dp_shard"] > 1 and sizes["cp"] > 1
        dimension = FLATTENED if both else "cp" if sizes["cp"] > 1 else "dp_shard"
        groups = [("dp_replicate", sizes["dp_replicate"]), (dimension, rank.at.shards)]
        groups = [(name, size) for name, size in groups if size > 1]
        whole = [one for one in infos if one.name in self.plain and one.requires_grad]
        buffers = [one for one in infos if one.kind == "buffer"]
        return UnitTraffic(
            units={unit.name: _sizes(unit, rank) for unit in self.units},
            dimension=dimension,
            ranks=rank.at.shards,
            replicas=rank.sizes["dp_replicate"],
            smaller={
                unit.name: unit.reshard_after_forward
                for unit in self.units
                if not isinstance(unit.reshard_after_forward, bool)
            },
            first=list(followed_buffers(buffers, self.batch_norms, groups)),
            last=list(averaged_gradients(whole, groups)),
        )

    def notes(self) -> Iterator[str]:
        yield from (f"replicated: {name} ({reason})" for name, reason in self.plain.items())
        if self.batch_norms:
            yield f"batch norms: {listed(self.batch_norms, 4)}; {_BATCH_NORM}"


def _sizes(unit: Unit, rank: Rank) -> UnitSizes:
    """The unit's bytes on a rank; gradients are those of trainable parameters."""
    policy, found = unit.mp_policy, dict.fromkeys(("gathered", "cast", "gradients", "reduced", "stored"), 0)
    for name in unit.parameters:
        info, numel = rank.tensors[name], padded_numel(rank.layouts[name], rank.at)
        casts = policy.param_dtype if info.dtype.is_floating_point else None  # FSDP2 casts no others
        computed, reduced = casts or info.dtype, policy.reduce_dtype or info.dtype
        if info.inner:  # gathered as they are
            cut = [(Layout(one.shape, True), one.dtype.itemsize) for one in info.inner if one.rows]
            nbytes = sum(prod(layout.local_shape(rank.at)) * size for layout, size in cut)
        else:
            nbytes = numel * computed.itemsize
            found["cast"] += nbytes if casts or unit.offload else 0
        found["gathered"] += nbytes * rank.at.shards
        if info.requires_grad:
            found["gradients"] += numel * reduced.itemsize * rank.at.shards
            found["reduced"] += numel * reduced.itemsize
            found["stored"] += numel * info.dtype.itemsize if reduced != info.dtype else 0
    return UnitSizes(
        **found, reshards=unit.reshard_after_forward is not False, offloads=unit.offload is not None
    )


def plan(
    structure: Structure, wishes: Wishes, sizes: Mapping[str, int], cut: Mapping[str, int]
) -> ShardingPlan | None:
    """Decide which unit manages which parameter, and how; None if DDP replicates the model.

    Args:
        cut: parameters on the tensor-parallel mesh, each with the number of its parts.
    """
    if wishes.config.ddp is not None:
        return None
    mesh = wishes.mesh
    if isinstance(mesh, DeviceMesh) and {"dp_replicate", "dp_shard"} & roles(mesh).keys() == {"dp_replicate"}:
        raise ParallelismValueError(
            "FSDP2 cannot use a mesh with dp_replicate and without dp_shard; add a dimension dp_shard of "
            "size 1, or replicate by DDP (ddp=DDPConfig())."
        )
    choices = choose_units(structure, wishes)
    shards = sizes["dp_shard"] * sizes["cp"]
    assignment = assign(structure, choices, shards)
    idle = idle_rules(wishes, assignment)
    blocks = innermost(assignment) or tuple(name for name, _ in structural_units(structure))
    kept = _ends_of_forward(assignment, blocks, wishes.children)
    units = tuple(
        _unit(group, structure, wishes, shards, ends_forward=kept.issuperset(group.modules))
        for group in assignment.groups
    )
    _refuse_complex(units, structure)
    methods = tuple(wishes.config.forward_methods)
    homes = {name: group for group in assignment.groups for name in group.modules}
    check_forward_methods(methods, structure, list(homes))
    reasons = {name: choices.units.get(name, group.choice).reason for name, group in homes.items()}
    several, check_order = any(size > 1 for size in sizes.values()), wishes.config.check_order
    replicas = shards * sizes["dp_replicate"]
    found = ShardingPlan(
        units=units,
        plain=assignment.plain,
        reasons=reasons,
        skipped=assignment.skipped,
        replicated=choices.plain,
        blocks=blocks,
        skippable=tuple(plan_skippable(structure, wishes, assignment)),
        forward_methods=methods,
        batch_norms=tuple(_batch_norms(structure)) if replicas > 1 else (),
        check_order=several and (wishes.device_type == "cpu" if check_order == "auto" else check_order),
        state_dict_type=(wishes.config.fsdp2 or FSDP2Config()).state_dict_type,
        warnings=(*choices.warnings, *assignment.warnings, *idle),
    )
    if sizes["tp"] > 1:
        found = _with_tensor_parallel(found, structure, sizes, cut, mesh)
    resharded = {name: u.reshard_after_forward for u in found.units for name in u.parameters}
    check_codecs(structure, resharded, sizes, cut)
    return found


def _batch_norms(structure: Structure) -> Iterator[str]:
    for name, module in structure.modules.items():
        if isinstance(module, _torch.AnyBatchNorm) and module.running_mean is not None:
            yield name


def innermost(assignment: Assignment) -> tuple[str, ...]:
    """The blocks of the model: units below the root that contain no other unit of their own kind."""
    names = [name for group in assignment.groups for name in group.modules if name and not group.split]
    outer = {above for name in names for above in ancestors(name) if above != name}
    return tuple(name for name in names if name not in outer)


def _ends_of_forward(assignment: Assignment, blocks: Sequence[str], children: Collection[str]) -> set[str]:
    """Units whose backward comes before that of units inside them, or of the blocks before them.

    The root, or the unit around all others, such as a model in a wrapper; the parts of a ComposerModel that
    have units inside; the last block of all, and the last one that is not itself such a part.
    """
    names = [name for group in assignment.groups if group.parameters for name in group.modules]
    around = {name for name in names[:1] if all(name in ancestors(other) for other in names)}
    nested = [name for name in blocks if name not in children]
    return {"", *around, *(name for name in children if name not in blocks), *blocks[-1:], *nested[-1:]}


def _unit(group: Draft, structure: Structure, wishes: Wishes, shards: int, ends_forward: bool) -> Unit:
    options, fsdp2 = group.choice.options, wishes.config.fsdp2 or FSDP2Config()
    mixed = mixed_precision_policy(wishes.precision, options.get("mixed_precision", fsdp2.mixed_precision))
    # Without a reduce_dtype, torch 2.15 reduces in the parameters' dtype, earlier versions in param_dtype.
    mixed = replace(mixed, reduce_dtype=mixed.reduce_dtype or mixed.param_dtype)
    return Unit(
        modules=tuple(group.modules),
        parameters=tuple(group.parameters),
        nbytes=sum(structure.tensors[name].info.nbytes for name in group.parameters),
        reshard_after_forward=_reshard(group, fsdp2, shards, ends_forward),
        mp_policy=options.get("mp_policy") or mixed,
        offload=_offload(options, fsdp2, wishes.device_type),
        reason=group.choice.reason,
    )


def _refuse_complex(units: Sequence[Unit], structure: Structure) -> None:
    for unit in units:
        if unit.mp_policy.reduce_dtype in (None, unit.mp_policy.param_dtype):
            continue
        for name in unit.parameters:
            if (info := structure.tensors[name].info).dtype.is_complex and info.requires_grad:
                raise ParallelismValueError(
                    f"{name} is complex, and FSDP2 cannot reduce its gradient in the reduce_dtype of its "
                    f"unit. Add Rule({name.rpartition('.')[0]!r}, shard=True, mixed_precision="
                    "{'param_dtype': None, 'reduce_dtype': None}), which casts nothing there."
                )


def _reshard(group: Draft, fsdp2: FSDP2Config, shards: int, ends_forward: bool) -> bool | int:
    """Whether a unit is resharded after forward.

    By default those that end the forward are not, because their backward follows at once and would gather
    them again (torch does this for the root, torchtitan for the root and the last block).
    """
    wanted: bool | int = group.choice.options.get("reshard_after_forward", fsdp2.reshard_after_forward)
    if isinstance(wanted, bool):
        by_default = "reshard_after_forward" not in group.choice.options
        return wanted and not (by_default and ends_forward)
    if wanted < 1 or shards % wanted:
        raise ParallelismValueError(
            f"reshard_after_forward={wanted} for {group.name} must be True, False, or a "
            f"number that divides the {shards} ranks that share each parameter."
        )
    return wanted == shards if wanted in {1, shards} else wanted


def _offload(options: Mapping[str, Any], fsdp2: FSDP2Config, device_type: str) -> str | None:
    policy = options.get("offload_policy")
    if isinstance(policy, CPUOffloadPolicy):
        return "pinned" if policy.pin_memory else "pageable"
    wanted = False if policy else options.get("offload", fsdp2.cpu_offload)
    if wanted is True:
        # The rule decides whether, and the configuration how.
        wanted = fsdp2.cpu_offload or True
    if wanted is True:
        return "pinned" if pins(None, device_type) else "pageable"
    return wanted or None


def _with_tensor_parallel(
    plan: ShardingPlan, structure: Structure, sizes: Mapping[str, int], cut: Mapping[str, int], mesh: object
) -> ShardingPlan:
    """The plan with tensor parallelism, where units gather this rank's parts of cut parameters.

    With a single data-parallel rank there are no units, unless they cast or offload.
    """
    alone = all(size == 1 for name, size in sizes.items() if name != "tp")
    if alone and all(unit.mp_policy == MixedPrecisionPolicy() and not unit.offload for unit in plan.units):
        why = "only tensor-parallel ranks share the model, and the matrices are cut among them"
        plain = {name: why for name in structure.parameters if name not in cut}
        skipped = {**plan.skipped, **dict.fromkeys(plan.reasons, why)}
        return replace(plan, units=(), plain=plain, reasons={}, skipped=skipped)
    if isinstance(mesh, DeviceMesh) and roles(mesh).keys() == {"tp"}:
        raise ParallelismValueError(
            "Mixed precision and offload need FSDP2, but the mesh has only tensor-parallel ranks; add a "
            "dimension dp_shard of size 1, or leave precision and offload out."
        )
    outside = [name for name in cut if name in plan.plain]
    if outside and not alone:
        raise ParallelismValueError(
            f"Tensor parallelism would cut {', '.join(outside)}, but no unit reduces the gradients over the "
            f"data-parallel ranks: {plan.plain[outside[0]]}. Add it to a unit, or leave it whole with "
            "Rule(..., tp='replicate')."
        )

    def gathered(name: str) -> int:
        return -(-structure.tensors[name].info.nbytes // cut.get(name, 1))

    units = tuple(replace(unit, nbytes=sum(map(gathered, unit.parameters))) for unit in plan.units)
    return replace(plan, units=units, plain={n: why for n, why in plan.plain.items() if n not in cut})


def idle_rules(wishes: Wishes, assignment: Assignment) -> list[str]:
    """Warnings about rules with a field for units, that match no unit."""
    units = {name for group in assignment.groups for name in group.modules}
    idle: dict[tuple[str, str], list[str]] = {}
    for key in UNIT_FIELDS:
        for name, (_, source) in wishes.ruled(key).items():
            idle.setdefault((source, key), []).append(name)
    texts = [
        f"{source} sets {key}, but {', '.join(name or 'the root' for name in names[:4])} "
        f"{'is not a unit' if len(names) == 1 else 'are not units'}; add shard=True, or leave it out."
        for (source, key), names in idle.items()
        if units.isdisjoint(names)
    ]
    return wishes.tolerated(texts)
