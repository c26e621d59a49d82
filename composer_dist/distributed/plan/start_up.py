"""What the delivery of weights sends and reads before the first step, by the schedules of `moving`."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Literal

from composer_dist.distributed.feature_plan import Rank, Transfer
from composer_dist.distributed.mesh.dimensions import DIMENSIONS
from composer_dist.distributed.mesh.layout import Coordinate, Layout
from composer_dist.distributed.moving.messages import Freight, Slice, in_buckets, message_sizes, slices_of
from composer_dist.distributed.moving.shares import shared_along, windows
from composer_dist.distributed.moving.transport import FEW
from composer_dist.distributed.plan.decisions import Decisions

Weights = Literal["rank0", "files"]
"""Where they come from."""


def delivered(plan: Decisions, rank: Rank, weights: Weights | None, one_host: bool) -> Iterator[Transfer]:
    """What one rank sends, receives and reads until it has its weights; sums of reads have count 1.

    Args:
        weights: None takes rank 0's if the plan's `sync` does, and otherwise counts nothing.
        one_host: whether all ranks can read each other's memory.
    """
    weights = weights or ("rank0" if plan.delivery.sync == "rank0" else None)
    freights = list(_freights(rank))
    if weights == "files":
        yield from _from_files(plan, rank)
    elif weights == "rank0" and plan.world_size > 1:
        way, few = plan.delivery.transport, sum(one.nbytes for one in freights) < FEW
        if way == "memory" or (way == "auto" and one_host and not few):
            yield from _from_memory(rank, freights)
        else:
            yield from _by_messages(rank, freights, plan.delivery.bucket_bytes)


def _freights(rank: Rank) -> Iterator[Freight]:
    for name, info in sorted(rank.tensors.items()):
        layout = rank.layouts.get(name, Layout(info.shape))
        if not info.inner:
            yield Freight(name, layout, info.dtype)
        for one in info.inner:
            yield Freight(f"{name}.{one.name}", Layout(one.shape, layout.rows and one.rows), one.dtype)


def _is_first(rank: Rank) -> bool:
    return rank.replica == rank.at.shard == rank.at.tp == 0


def _from_memory(rank: Rank, freights: Sequence[Freight]) -> Iterator[Transfer]:
    if not _is_first(rank):
        nbytes = sum(one.layout.part(rank.at).numel * one.dtype.itemsize for one in freights)
        yield Transfer("read", "memory of rank 0", 2, nbytes)


def _by_messages(rank: Rank, freights: Sequence[Freight], limit: int) -> Iterator[Transfer]:
    """As `moving.deliver` does: cut tensors to one replica and then to the others, whole ones to all."""
    for bucket in in_buckets(slices_of(freights, rank.at, limit), lambda one: one.nbytes, limit):
        cut, whole = ([one for one in bucket if one.cargo.cut is kind] for kind in (True, False))
        if rank.replica == 0:
            yield from _sent(rank, cut)
        if (replicas := rank.sizes["dp_replicate"]) > 1:
            for nbytes in message_sizes(cut, rank.at):
                yield Transfer("broadcast", "dp_replicate", replicas, nbytes)
        for nbytes in message_sizes(whole, rank.at):
            yield from _spread(rank, nbytes)


def _sent(rank: Rank, slices: Sequence[Slice[Freight]]) -> Iterator[Transfer]:
    """From rank 0 to each other rank of its replica."""
    names = [name for name in DIMENSIONS[1:] if rank.sizes[name] > 1]
    peers = [
        replace(rank.at, shard=shard, tp=tp) for shard in range(rank.at.shards) for tp in range(rank.at.tps)
    ]
    mine: list[Coordinate] = peers[1:] if _is_first(rank) else [rank.at]
    for at in mine:
        for nbytes in message_sizes(slices, at):
            yield Transfer("send", " x ".join(names), 2, nbytes, stride=at.shard * at.tps + at.tp)


def _spread(rank: Rank, nbytes: int) -> Iterator[Transfer]:
    """Broadcast along every dimension, the innermost first, by the ranks that have it by then."""
    cp = rank.sizes["cp"]
    here = dict(
        zip(DIMENSIONS, (rank.replica, rank.at.shard // cp, rank.at.shard % cp, rank.at.tp), strict=True)
    )
    for index, name in reversed([*enumerate(DIMENSIONS)]):
        if rank.sizes[name] > 1 and not any(here[outer] for outer in DIMENSIONS[:index]):
            yield Transfer("broadcast", name, rank.sizes[name], nbytes)


def _from_files(plan: Decisions, rank: Rank) -> Iterator[Transfer]:
    """What `weights=` reads of parameters and gathers, without the files' headers."""
    read = 0
    gathered: list[Transfer] = []
    for name, layout in rank.layouts.items():
        size, numel = rank.tensors[name].dtype.itemsize, layout.part(rank.at).numel
        shared = shared_along(layout, numel * size, rank.sizes)
        holders = prod(rank.sizes[one] for one in shared)
        found = list(windows(numel, size, holders, plan.delivery.bucket_bytes)) if shared else []
        read += numel * size - sum(length - length // holders for _, length in found) * size
        for _, length in found:
            for index in reversed(range(len(shared))):  # along the innermost dimension first
                block = length // prod(rank.sizes[outer] for outer in shared[:index])
                ranks = rank.sizes[shared[index]]
                gathered.append(Transfer("all_gather", shared[index], ranks, block * size))
    yield Transfer("read", "files", 1, read)
    yield from gathered
