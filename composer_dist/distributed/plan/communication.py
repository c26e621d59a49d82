"""What ranks send to each other: collectives, their bytes, and their time on stated links."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from math import prod
from types import MappingProxyType

from composer_dist.distributed.feature_plan import Moment, Rank, StepEvent, Transfer
from composer_dist.distributed.mesh.dimensions import FLATTENED
from composer_dist.distributed.plan.decisions import Decisions
from composer_dist.distributed.plan.start_up import Weights, delivered
from composer_dist.distributed.plan.text import table
from composer_dist.distributed.plan.topology import Topology
from composer_dist.wording import human_bytes


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind."""

    phase: str
    """"start-up", "forward" or "backward"."""
    collective: str
    """"all_gather", "reduce_scatter", "all_reduce", "broadcast" or "send"; or "read", not a collective."""
    dimension: str
    """Of the mesh, or several, "dp_shard x tp"; what is read."""
    ranks: int
    """In the group."""
    count: int
    bytes: int
    """Of all of them: gathered outputs, inputs that are scattered, tensors that are reduced or sent, and what
    is read."""
    seconds: float
    """The sum of their times, with nothing else on the links; 0 for reads."""


class Communication(tuple[Traffic, ...]):
    """The rows of the start-up and of a step, in the order of their first collectives."""

    uncounted: tuple[str, ...] = ()
    """Features whose collectives are not among the rows, because they depend on the batch."""
    how: Mapping[str, str] = MappingProxyType({})
    """How `count`, `bytes` and `seconds` were got: "exact", of a traced step; "untraced", of a step in which
    each unit runs once; or "modeled"."""

    def __str__(self) -> str:
        headings = {
            **dict.fromkeys(("phase", "collective", "dimension"), "left"),
            "ranks": "right",
            **dict.fromkeys((f"{key} ({how})" for key, how in self.how.items()), "right"),
        }
        rows = [
            (
                one.phase,
                one.collective,
                one.dimension,
                str(one.ranks),
                str(one.count),
                human_bytes(one.bytes),
                f"{one.seconds * 1000:.3f} ms",
            )
            for one in self
        ]
        left = [f"not counted without a batch: the collectives of {name}" for name in self.uncounted]
        return "\n".join([table("", headings, rows) if rows else "Nothing is sent.", *left])


def estimate_communication(
    plan: Decisions,
    rank: Rank,
    events: Iterable[StepEvent] | None,
    topology: Topology,
    weights: Weights | None,
) -> Communication:
    """See `ParallelPlan.communication`; without events, of a step in which each unit runs once."""
    found: dict[tuple[str, str, str, int], tuple[int, int, float]] = {}
    start, one_host = StepEvent("start-up", "start-up", ""), plan.world_size <= topology.ranks_per_host
    for event, sent in transfers(plan, rank, chain([start], _untraced(plan) if events is None else events)):
        first = delivered(plan, rank, weights, one_host) if event is start else ()
        for one, stride in (*((one, _stride(rank, one)) for one in first), *sent):
            read = one.collective == "read"
            took = 0.0 if read else topology.seconds(one.collective, one.nbytes, one.ranks, stride)
            key = event.phase, one.collective, one.dimension, one.ranks
            count, nbytes, seconds = found.get(key, (0, 0, 0.0))
            found[key] = count + 1, nbytes + one.nbytes, seconds + took
    rows = Communication(Traffic(*key, *sums) for key, sums in found.items())
    counted = "untraced" if events is None else "exact"
    rows.how = {"count": counted, "bytes": counted, "seconds": "modeled"}
    rows.uncounted = tuple(name for name in _BY_BATCH if events is None and name in plan.features)
    return rows


_BY_BATCH = ("tensor_parallel", "context_parallelism")
"""Features that send activations."""


def transfers(
    plan: Decisions, rank: Rank, events: Iterable[StepEvent]
) -> Iterator[tuple[StepEvent, list[tuple[Transfer, int]]]]:
    """Each event, and what all features send then, with the ranks between neighbors of the group."""
    followers = [follow for one in plan.features.values() if (follow := one.communication(rank))]
    for event in events:
        sent = [one for follow in followers for one in follow(event)]
        yield event, [(one, _stride(rank, one)) for one in sent]


def _stride(rank: Rank, one: Transfer) -> int:
    """Ranks between neighbors in its group."""
    if one.stride or one.collective == "read":
        return one.stride
    names = list(rank.sizes)
    last = "cp" if one.dimension == FLATTENED else one.dimension
    return prod(rank.sizes[name] for name in names[names.index(last) + 1 :])


REDUCTION: tuple[Moment, ...] = ("before reduction", "after reduction")


def _untraced(plan: Decisions) -> Iterator[StepEvent]:
    """A step in which each unit runs once."""
    names = [unit.name for unit in plan.units]
    yield StepEvent("begin", "forward", "")
    yield from (StepEvent("before forward", "forward", name) for name in names)
    yield from (StepEvent("after forward", "forward", name) for name in (*names[1:], *names[:1]))
    for name in (*names[:1], *reversed(names[1:])):
        yield StepEvent("before backward", "backward", name)
        if name != names[0]:
            yield StepEvent("before reduction", "backward", name)
            yield StepEvent("after reduction", "backward", name)
    yield from (StepEvent(moment, "backward", name) for moment in REDUCTION for name in names[:1])
    yield StepEvent("after backward", "backward", "")
