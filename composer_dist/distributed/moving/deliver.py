"""Delivers weights from the rank that has them to the shards of all ranks.

Each rank receives only its part of a tensor that is cut, and all of a whole one (buffers, parameters that
stay plain). If the mesh has replicas, a slice goes to one of them only, which then replicates what it has
received. `messages.py` defines the terms.
"""

from collections.abc import Mapping, Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist

from composer_dist.distributed.mesh.layout import Coordinate, Layout
from composer_dist.distributed.mesh.mesh import Mesh
from composer_dist.distributed.moving.messages import LARGE, Cargo, Parcel, Slice, in_buckets, slices_of
from composer_dist.progress import Stage
from composer_dist.tensors.inner import local_part, parts


def inner_cargoes(name: str, tensor: torch.Tensor, source: torch.Tensor | None) -> list[Cargo]:
    """The cargoes that fill a tensor or shard of the model in place: one, or one per inner tensor.

    `source` is the full value, of the same class, on the source rank only.
    """
    return [
        Cargo(part, Layout.of(target), target.dtype, local_part(target), value)
        for part, target, value in parts(name, tensor, source)
    ]


def take_part(cargo: Cargo, here: Coordinate) -> None:
    """Fill this rank's part from its own copy of the full tensor, without communication."""
    assert cargo.source is not None
    part, target = cargo.layout.part(here), cargo.target.view(-1)
    step = max(1, LARGE // cargo.dtype.itemsize)  # what is not a view is copied on its way
    for start in range(0, part.numel, step):
        target[start : start + step].copy_(part.of(cargo.source, start, start + step))


@torch.no_grad()
def deliver(
    cargoes: Mapping[int, Sequence[Cargo]], mesh: Mesh, bucket_bytes: int, stage: Stage | None = None
) -> int:
    """Bring each cargo from its source rank to the targets on all ranks of the mesh.

    Args:
        cargoes: source rank (global) to its cargoes; the same, in the same order, on every rank.
        bucket_bytes: most bytes of one source that are on their way at one time.
        stage: where to count what has been delivered.

    Returns:
        Bytes that this rank has sent and received.
    """
    schedules = {
        source: list(
            in_buckets(slices_of(items, mesh.here, bucket_bytes), lambda one: one.nbytes, bucket_bytes)
        )
        for source, items in cargoes.items()
    }
    stage = stage or Stage("delivery")
    stage.expect(sum(one.nbytes for buckets in schedules.values() for bucket in buckets for one in bucket))
    moved = 0
    for step in zip_longest(*schedules.values()):
        for cut in (True, False):
            bucket = {
                source: [one for one in slices if one.cargo.cut is cut]
                for source, slices in zip(schedules, step, strict=True)
                if slices
            }
            moved += _scatter(bucket, mesh) if cut else _broadcast(bucket, mesh)
        stage.advance(sum(one.nbytes for bucket in step if bucket for one in bucket))
    return moved


def _scatter(bucket: dict[int, list[Slice[Cargo]]], mesh: Mesh) -> int:
    """One bucket of slices that are cut: from each source to its replica, then across the replicas."""
    sends: list[dist.P2POp] = []
    arrivals: list[tuple[int, Parcel]] = []
    moved, replica = 0, mesh.replica(mesh.rank)
    for source, slices in bucket.items():
        peers, mine = mesh.replica(source), Parcel.into(slices, mesh)
        arrivals.append((peers[replica.index(mesh.rank)], mine))
        if source == mesh.rank:
            for peer in peers:
                parcel = Parcel.out_of(slices, mesh, peer)
                if peer == mesh.rank:
                    mine.copy_from(parcel)
                else:
                    sends += [dist.P2POp(dist.isend, message, peer) for message in parcel.messages]
                    moved += parcel.nbytes
        elif source in replica:
            sends += [dist.P2POp(dist.irecv, message, source) for message in mine.messages]
            moved += mine.nbytes
    if sends:
        for work in dist.batch_isend_irecv(sends):
            work.wait()
    for twin, parcel in arrivals:  # the rank at this one's place in the replica that has received
        if mesh.size > len(replica):
            for message in parcel.messages:
                _spread(message, mesh, twin, dims=1)
            moved += parcel.nbytes
        parcel.unpack()
    return moved


def _broadcast(bucket: dict[int, list[Slice[Cargo]]], mesh: Mesh) -> int:
    """One bucket of whole slices: from each source to all ranks, dimension by dimension of the mesh."""
    moved = 0
    for source, slices in bucket.items():
        parcel = Parcel.into(slices, mesh)
        if source == mesh.rank:
            parcel.copy_from(Parcel.out_of(slices, mesh, mesh.rank))
        for message in parcel.messages:
            _spread(message, mesh, source, dims=mesh.device_mesh.ndim)
        moved += parcel.nbytes
        parcel.unpack()
    return moved


def _spread(message: torch.Tensor, mesh: Mesh, source: int, dims: int) -> None:
    """Broadcast from `source` along the outermost `dims` mesh dimensions, the innermost of them first.

    Ranks that differ from the source in a further dimension start from their own message.
    """
    over = mesh.device_mesh
    here: list[int] = list(over.get_coordinate() or ())
    there = (over.mesh == source).nonzero()[0].tolist()
    for dim in reversed(range(dims)):
        if here[:dim] == there[:dim] and over.size(dim) > 1:
            index = [*here[:dim], there[dim], *here[dim + 1 :]]
            dist.broadcast(message, int(over.mesh[tuple(index)]), group=over.get_group(dim))
