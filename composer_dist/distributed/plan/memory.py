"""How much memory a rank needs: the parts that it holds exactly, the rest from a traced step."""

import warnings
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from composer_dist import _torch
from composer_dist.distributed.feature_plan import Rank, StepEvent
from composer_dist.distributed.mesh.layout import Coordinate, Layout, padded_numel
from composer_dist.distributed.optimizers.follow import is_low_bit
from composer_dist.distributed.plan.decisions import Decisions, Subject
from composer_dist.distributed.plan.record import storages_made
from composer_dist.distributed.plan.text import table
from composer_dist.errors import ParallelismValueError
from composer_dist.structure.structure import Structure
from composer_dist.tensors.inner import inner_tensors
from composer_dist.tensors.nested import tensors_in
from composer_dist.wording import human_bytes

HOW = {
    **dict.fromkeys(("parameters", "gradients", "optimizer", "buffers", "padding"), "exact"),
    **dict.fromkeys(("gathered", "communication"), "modeled"),
    **dict.fromkeys(("activations", "logits", "host"), "traced"),
}
"""How each number is got."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """The memory of one rank in bytes, without cuBLAS's workspace. Only `reserved` has the allocator's slack.

    The parts that a rank holds are exact. Those of a step are traced, and each is the most at any time of it;
    together they need not be in use at once. `peak` is the most that everything takes at a time.
    """

    how: ClassVar[Mapping[str, str]] = {**HOW, "peak": "modeled"}
    """How each number was got: it is "exact", "traced" or "modeled"."""
    parameters: int
    """This rank's parts of the parameters."""
    gradients: int
    """Of the gradients of trainable parameters, as the optimizer finds them."""
    optimizer: int
    """Of the optimizers' state."""
    buffers: int
    """The model's buffers, and tensors that are attributes of its modules."""
    padding: int
    """What FSDP2 adds to parts, so that all ranks have as much."""
    host: int
    """What is offloaded to host memory, not counted elsewhere: exact, but for traced activations."""
    gathered: int = 0
    """Whole parameters."""
    activations: int = 0
    """What operators make: what autograd saves, temporary tensors, and gradients before they are reduced."""
    logits: int = 0
    """Tensors that are as wide as the vocabulary, most of them in the loss."""
    communication: int = 0
    """Buffers of collectives."""
    peak: int = 0
    reserved: int = 0
    """What torch's caching allocator has reserved on an accelerator after a step; see `Allocator`."""
    peak_at: str = ""
    """Phase and unit."""
    at_peak: Mapping[str, int] = field(default_factory=dict)
    """The bytes of each kind at the peak; they add up to it."""
    timeline: tuple[tuple[str, str, Mapping[str, int]], ...] = field(default=(), repr=False)
    """Phase, unit and the bytes of each kind, whenever the unit changes and at the peak of each."""

    def __str__(self) -> str:
        rows = [
            (kind, human_bytes(most), human_bytes(self.at_peak.get(kind, 0)) if self.peak_at else "", how)
            for kind, how in HOW.items()
            if (most := getattr(self, kind))
        ]
        if self.peak_at:
            rows.append(("all", human_bytes(self.peak), human_bytes(self.peak), self.peak_at))
            rows.append(("reserved", human_bytes(self.reserved), "", "modeled"))
        else:
            rows.append(("all", human_bytes(self.peak), "", "without a step"))
        headings = {"memory of one rank": "left", "most": "right", "at the peak": "right", "how": "left"}
        return table("", headings, rows)


def estimate_memory(
    plan: Decisions, subject: Subject, here: Rank, events: Sequence[StepEvent] | None
) -> MemoryEstimate:
    """See `ParallelPlan.memory`; without events, without a step."""
    known, extra = held_memory(plan, subject, here)
    return known if events is None else followed_memory(plan, here, known, extra, events)


def held_memory(plan: Decisions, subject: Subject, here: Rank) -> tuple[MemoryEstimate, int]:
    """What a rank holds between steps and its gradients; and what the optimizer's step needs in addition."""
    structure = subject.structure
    offloaded = {name for unit in plan.units if unit.offload for name in unit.parameters}
    held: Counter[str] = Counter()
    for name, layout in here.layouts.items():
        info, nbytes = here.tensors[name], _local_bytes(here, name)
        padded = padded_numel(layout, here.at) * info.dtype.itemsize
        padding = padded - nbytes if layout.rows and not info.inner else 0
        gradient = nbytes if info.requires_grad else 0
        if name in offloaded:
            held["host"] += nbytes + padding + gradient
        else:
            held.update(parameters=nbytes, padding=max(padding, 0), gradients=gradient)
    held["buffers"] = sum(one.nbytes for one in here.tensors.values() if one.kind != "parameter")
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.compile with fullgraph=")  # torch 2.12's
        stepped = [_step(optimizer, structure, here) for optimizer in subject.optimizers]
    state, extra = sum(one for one, _ in stepped), max((most for _, most in stepped), default=0)
    held["host" if offloaded else "optimizer"] += state
    exact = {kind: held[kind] for kind, how in HOW.items() if how == "exact"}
    estimate = MemoryEstimate(**exact, host=held["host"], peak=sum(exact.values()))  # type: ignore[arg-type]
    return estimate, 0 if offloaded else extra


def rank_of(plan: Decisions, structure: Structure, number: int) -> Rank:
    """A rank of the plan's mesh."""
    if not 0 <= number < plan.world_size:
        raise ParallelismValueError(f"rank={number}: the plan has ranks 0 to {plan.world_size - 1}.")
    sizes, cuts = plan.mesh, plan.tensor_parallel.cuts if plan.tensor_parallel else {}
    shards = sizes["dp_shard"] * sizes["cp"]
    at = Coordinate(number // sizes["tp"] % shards, shards, number % sizes["tp"], sizes["tp"])
    layouts = {}
    for name, one in structure.parameters.items():
        cut = cuts.get(name)
        cut_rows = name in plan.parameter_units
        layouts[name] = Layout(one.info.shape, cut_rows, cut.dim if cut else None, cut.groups if cut else 1)
    tensors = {name: one.info for name, one in structure.tensors.items()}
    return Rank(sizes, at, number // sizes["tp"] // shards, plan.device_type, tensors, layouts)


def _local_bytes(rank: Rank, name: str) -> int:
    info, layout = rank.tensors[name], rank.layouts[name]
    if not info.inner:
        return torch.Size(layout.local_shape(rank.at)).numel() * info.dtype.itemsize
    shapes = [
        (Layout(one.shape, layout.rows and one.rows).local_shape(rank.at), one.dtype) for one in info.inner
    ]
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in shapes)


def _step(optimizer: Optimizer | type[Optimizer], structure: Structure, rank: Rank) -> tuple[int, int]:
    """The bytes of an optimizer's state, and the most that a step needs in addition.

    Two steps of a copy run on this rank's parts, on the meta device; the second one finds the state.
    """
    names = {id(held.get()): name for name, held in structure.parameters.items()}
    if isinstance(optimizer, type):
        made = {name: _part(rank, name) for name in rank.layouts if rank.tensors[name].requires_grad}
        names = {id(part): name for name, part in made.items()}
        optimizer = optimizer(made.values())  # type: ignore[call-arg]
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        parts = [_part(rank, names[id(one)]) for one in group["params"] if id(one) in names]
        fast = {"foreach": rank.device_type != "cpu"} if group.get("foreach", 0) is None else {}
        groups.append({**group, **fast, "params": parts, **({"fused": False} if group.get("fused") else {})})
    twin: Any = object.__new__(type(optimizer))
    twin.__dict__.update(vars(optimizer), state=defaultdict(dict), param_groups=groups)
    _torch.forget_step_hooks(twin)
    try:
        twin.step()
    except (RuntimeError, TypeError) as error:
        raise ParallelismValueError(
            f"What {type(optimizer).__name__} needs is not known, because its step needs values ({error}). "
            "Plan without an optimizer, or with one that is like it."
        ) from error
    held = (one for values in twin.state.values() for one in tensors_in(values))
    state = [part for one in held for part in inner_tensors(one).values() or [one]]
    parts = [one for group in groups for one in group["params"]]
    grads = (one.grad for one in parts if one.grad is not None)
    with storages_made([*state, *parts, *grads]) as most:
        twin.step()
    one_kernel = is_low_bit(optimizer) or all(group.get("fused") for group in optimizer.param_groups)
    return sum(one.nbytes for one in state), 0 if one_kernel else most()


def _part(rank: Rank, name: str) -> nn.Parameter:
    info = rank.tensors[name]
    local = torch.empty(rank.layouts[name].local_shape(rank.at), dtype=info.dtype, device="meta")
    part = nn.Parameter(local, requires_grad=info.requires_grad)
    part.grad = torch.empty_like(local) if info.requires_grad else None
    return part


def followed_memory(
    plan: Decisions,
    rank: Rank,
    known: MemoryEstimate,
    extra: int,
    events: Sequence[StepEvent],
    microbatches: int = 1,
) -> MemoryEstimate:
    """The estimate from what the features say of each event, and the `extra` of the optimizer's step.

    The gradients of later microbatches are added to those of the first; the third is like the second.
    """
    now: Counter[str] = Counter(
        {kind: getattr(known, kind) for kind in ("parameters", "optimizer", "buffers", "padding")}
    )
    host, most = known.host, Counter(host=known.host)
    best, at, where, held = Counter[str](), "", None, now.total()
    total, allocator = held, Allocator()
    peak = high = total
    timeline: list[tuple[str, str, Mapping[str, int]]] = []
    entered = 0
    for event, changes in _changes(plan, rank, extra, events, microbatches):
        if where != (event.phase, event.unit):
            where, high = (event.phase, event.unit), total
            timeline.append((*where, dict(now)))
            entered = len(timeline)
        for kind, nbytes in changes:
            if kind == "host":
                host += nbytes
                most[kind] = max(most[kind], host)
                continue
            allocator.change(kind, nbytes)
            now[kind] += nbytes
            total += nbytes
            most[kind] = max(most[kind], now[kind])
            if total > high:
                high = total
                timeline[entered:] = [(event.phase, event.unit, dict(now))]
            if total > peak:
                peak, best, at = total, now.copy(), f"{event.phase} of {event.unit or 'the root'}"
    return replace(
        known,
        **{kind: most[kind] for kind, how in HOW.items() if how != "exact"},
        peak=peak,
        reserved=held + allocator.reserved,
        peak_at=at,
        at_peak=dict(best),
        timeline=tuple(timeline),
    )


def _changes(
    plan: Decisions, rank: Rank, extra: int, events: Sequence[StepEvent], microbatches: int
) -> Iterator[tuple[StepEvent, list[tuple[str, int]]]]:
    """Each event, and what is allocated or freed then."""
    viewed = plan.replication is not None and plan.replication.arguments["gradient_as_bucket_view"]
    left = [name for name, one in rank.layouts.items() if not one.rows and rank.tensors[name].requires_grad]
    plain = 0 if viewed else sum(_local_bytes(rank, name) for name in left)
    for number in range(min(microbatches, 2)):
        followers = [found for one in plan.features.values() if (found := one.memory(rank))]
        for event in events:
            changes: list[tuple[str, int]] = [change for follow in followers for change in follow(event)]
            if event.moment == "after backward":
                changes += [("activations", -plain), ("gradients", plain)]
            if event.moment in ("allocate", "free"):
                changes.append((event.kind, event.nbytes if event.moment == "allocate" else -event.nbytes))
            if number:
                changes += [(kind, -nbytes) for kind, nbytes in changes if kind == "gradients"]
            yield event, changes
    yield StepEvent("allocate", "step", ""), [("activations", extra)]
    yield StepEvent("free", "step", ""), [("activations", -extra)]


MIB = 1 << 20
ROUND, SMALL, LARGE = 512, MIB, 10 * MIB
SMALL_SEGMENT, LARGE_SEGMENT, ROUND_SEGMENT = 2 * MIB, 20 * MIB, 2 * MIB


@dataclass(eq=False)
class Block:
    """A part of a segment; a segment's blocks are a list with two ends."""

    size: int
    start: int
    """In an address space in which segments do not touch."""
    is_small: bool
    is_free: bool = False
    before: "Block | None" = None
    after: "Block | None" = None


class Allocator:
    """What torch's caching allocator reserves for what is allocated and freed, in bytes; it never falls.

    The rules are those of c10/cuda/CUDACachingAllocator.cpp with default settings: sizes are rounded to 512
    bytes; blocks come from segments of 2 MiB (up to 1 MiB), of 20 MiB (up to 10 MiB) or of their own size,
    rounded to 2 MiB; the smallest free block that is large enough is taken and split; free neighbors join.
    Left out: streams, expandable segments, and a full device, where unused segments are returned.
    """

    def __init__(self) -> None:
        self.reserved = 0
        self._used: dict[tuple[str, int], list[Block]] = defaultdict(list)
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}
        """By size and address, for small blocks and large ones."""

    def change(self, kind: str, nbytes: int) -> None:
        """Allocate `nbytes`, or free what was last allocated with this kind and size if it is negative."""
        if nbytes > 0:
            self._used[kind, nbytes].append(self._take(-(-nbytes // ROUND) * ROUND))
        elif nbytes < 0 and (held := self._used.get((kind, -nbytes))):
            self._give(held.pop())

    def _take(self, size: int) -> Block:
        small = size <= SMALL
        free = self._free[small]
        place = bisect_left(free, size, key=lambda one: one[0])
        block = free.pop(place)[2] if place < len(free) else self._segment(size, small)
        block.is_free = False
        left = block.size - size
        if left >= ROUND if small else left > SMALL:
            rest = Block(left, block.start + size, small, True, block, block.after)
            if block.after is not None:
                block.after.before = rest
            block.size, block.after = size, rest
            self._keep(rest)
        return block

    def _segment(self, size: int, small: bool) -> Block:
        if small:
            size = SMALL_SEGMENT
        elif size < LARGE:
            size = LARGE_SEGMENT
        else:
            size = -(-size // ROUND_SEGMENT) * ROUND_SEGMENT
        self.reserved += size
        return Block(size, self.reserved, small)

    def _give(self, block: Block) -> None:
        if (after := block.after) is not None and after.is_free:
            self._drop(after)
            block.size, block.after = block.size + after.size, after.after
            if block.after is not None:
                block.after.before = block
        if (before := block.before) is not None and before.is_free:
            self._drop(before)
            before.size, before.after = before.size + block.size, block.after
            if before.after is not None:
                before.after.before = before
            block = before
        self._keep(block)

    def _keep(self, block: Block) -> None:
        block.is_free = True
        insort(self._free[block.is_small], (block.size, block.start, block), key=lambda one: one[:2])

    def _drop(self, block: Block) -> None:
        free = self._free[block.is_small]
        free.pop(bisect_left(free, (block.size, block.start), key=lambda one: one[:2]))
