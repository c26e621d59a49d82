"""How long a collective takes on stated links, as NCCL chooses among its algorithms.

The formulas are those of NCCL's src/graph/tuning.cc (`ncclTopoTuneModel`, `ncclTopoGetAlgoTime`), which
torch/_inductor/comm_analysis.py repeats in Python: a collective takes its start, a latency for each step
and its bytes by the bandwidth of a ring or a tree, and the algorithm and protocol with the least time is
used. The formulas omit the protocol LL128, the corrections of trees for medium sizes and the limits of
single channels.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, log2
from typing import Literal, NamedTuple, TypeVar

from composer_dist.errors import ParallelismValueError


class Algorithm(NamedTuple):
    """An algorithm under one protocol; seconds."""

    shape: Literal["ring", "tree"]
    start: float
    step: float
    """Between two ranks of a host."""
    hop: float
    """Between two hosts."""
    share: float
    """Of the bandwidth that the protocol uses."""


NCCL = (
    Algorithm("ring", 6.6e-6, 0.6e-6, 2.7e-6, 1 / 2),
    Algorithm("ring", 8.4e-6, 3.4e-6, 14e-6, 1),
    Algorithm("tree", 6.8e-6, 0.6e-6, 5e-6, 1 / 3.8),
    Algorithm("tree", 8.4e-6, 4e-6, 14e-6, 0.92),
)
"""The protocols LL and Simple; the constants are `ncclTunerConstantsDefaults`."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The links between ranks.

    Neighbors in the mesh fill the hosts in order. Where several ranks of a group are on one host, the rings
    of the group use the network of each of them.
    """

    ranks_per_host: int = 8
    within: float
    """Bytes per second of a rank to others of its host, in one direction."""
    between: float
    """Bytes per second of a rank to other hosts."""
    algorithms: tuple[Algorithm, ...] = NCCL

    def seconds(self, collective: str, nbytes: int, ranks: int, stride: int = 1) -> float:
        """The time of one collective, with nothing else on the links.

        Args:
            collective: "all_gather", "reduce_scatter", "all_reduce", "broadcast" or "send".
            nbytes: of a gathered output, an input to be scattered, or the tensor.
            ranks: in the group.
            stride: between neighbors of the group, in ranks.
        """
        near = min(ranks, max(1, self.ranks_per_host // stride))
        hosts = ceil(ranks / near)
        bandwidth = self.within if hosts == 1 else min(self.within, self.between * near)
        if near == 1 and hosts > 1:
            bandwidth = self.between
        chosen = [one for one in self.algorithms if one.shape == "ring" or collective == "all_reduce"]
        return min(_seconds(one, collective, nbytes, near, hosts, bandwidth * one.share) for one in chosen)


def _seconds(one: Algorithm, collective: str, nbytes: int, near: int, hosts: int, bandwidth: float) -> float:
    ranks = near * hosts
    if one.shape == "tree":  # up and down
        latency = 2 * ((near - 1) * one.step + int(log2(hosts)) * one.hop)
        return one.start + latency + 2 * nbytes / bandwidth
    rounds = {"all_reduce": 2, "send": 0}.get(collective, 1)
    steps, hops = rounds * (ranks - 1), rounds * (hosts - 1)
    volume = {"broadcast": 1, "send": 1}.get(collective, rounds * (ranks - 1) / ranks)
    return one.start + (steps - hops) * one.step + hops * one.hop + volume * nbytes / bandwidth


TOPOLOGIES: Mapping[str, Topology] = {
    "h100": Topology(within=370e9, between=50e9),
    "a100": Topology(within=240e9, between=25e9),
}
"""NVLink and a network interface for each GPU, by the numbers of torch/_inductor/comm_analysis.py: NVLink 4
and InfiniBand NDR (400 Gbit/s), NVLink 3 and HDR (200 Gbit/s)."""


T = TypeVar("T")


def by_name(value: T | str, known: Mapping[str, T]) -> T:
    """A topology or a device, also by its name.

    Raises:
        ParallelismValueError: nothing has this name.
    """
    if not isinstance(value, str):
        return value
    if value not in known:
        kind = type(next(iter(known.values()))).__name__
        raise ParallelismValueError(
            f"There is no {kind.lower()} {value!r}. Valid names: {', '.join(known)}; or give a {kind}."
        )
    return known[value]
