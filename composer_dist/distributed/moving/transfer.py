"""Weights from the rank that has them to the shards of all.

A *cargo* is one tensor on its way from a source rank to every rank of the mesh: each rank receives
only its part of a tensor that is cut, and all of a whole one (buffers, parameters that stay plain). The
schedule is computed alike on every rank: cargoes are cut into *pieces*, pieces are packed into
*buckets* of bounded size. Within a bucket a piece of a megabyte or more travels straight from the
source's storage into the target's, smaller ones share a staging buffer. Where the mesh has replicas a
piece goes to one of them only, which then replicates what it has received.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import prod
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from composer_dist.distributed.mesh.layout import Coordinate, Layout, grid
from composer_dist.distributed.mesh.mesh import Mesh
from composer_dist.progress import Stage
from composer_dist.tensors.inner import local_part, parts
from composer_dist.tensors.parts import as_bytes

LARGE = 1 << 20
"""Bytes from which a piece is worth a message of its own."""


@dataclass
class Freight:
    """A tensor that travels in pieces."""

    name: str
    layout: Layout
    dtype: torch.dtype

    @property
    def cut(self) -> bool:
        """Whether ranks get different parts, or everything."""
        return self.layout.rows or self.layout.tp_dim is not None

    @property
    def nbytes(self) -> int:
        """Of the full tensor."""
        return prod(self.layout.shape) * self.dtype.itemsize


@dataclass
class Cargo(Freight):
    """One tensor to deliver."""

    target: torch.Tensor
    """Where this rank's part goes: contiguous, of the part's elements in row-major order."""
    source: torch.Tensor | None = None
    """The full tensor, on the source rank only; any layout, any device, any dtype."""


F = TypeVar("F", bound=Freight)


def inner_cargoes(name: str, tensor: torch.Tensor, source: torch.Tensor | None) -> list[Cargo]:
    """The cargoes that fill a tensor of the model in place: one, or one for each of its inner tensors.

    Args:
        tensor: full, or this rank's shard.
        source: the full value, of the same class, on the source rank only.
    """
    return [
        Cargo(part, Layout.of(target), target.dtype, local_part(target), value)
        for part, target, value in parts(name, tensor, source)
    ]


@dataclass(frozen=True)
class Piece(Generic[F]):
    """The elements [start, stop) of each rank's part of a cargo, in row-major order."""

    cargo: F
    start: int
    stop: int


@dataclass(frozen=True)
class Ranks:
    """The mesh as a table of global ranks: `(replicas, shards, tp)`; parts differ within a replica."""

    mesh: DeviceMesh
    table: torch.Tensor
    me: int

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Ranks:
        """Read a mesh of any dimensions."""
        return cls(mesh, grid(mesh), mesh.get_rank())

    @property
    def device(self) -> torch.device:
        """Where the groups' messages must lie."""
        return Mesh(self.mesh).device

    @property
    def parts(self) -> int:
        """Ranks of one replica: into how many parts a tensor may be cut."""
        return self.table[0].numel()

    def replica(self, rank: int) -> int:
        """The replica that a global rank belongs to."""
        return int((self.table == rank).nonzero()[0, 0])

    def spread(self, message: torch.Tensor, source: int, dims: int) -> None:
        """Broadcast from `source` along the outermost `dims` mesh dimensions, the innermost of them first.

        Ranks that differ from the source in a further dimension start from their own message.
        """
        here: list[int] = list(self.mesh.get_coordinate() or ())
        there = (self.mesh.mesh == source).nonzero()[0].tolist()
        for dim in reversed(range(dims)):
            if here[:dim] == there[:dim] and self.mesh.size(dim) > 1:
                index = [*here[:dim], there[dim], *here[dim + 1 :]]
                dist.broadcast(message, int(self.mesh.mesh[tuple(index)]), group=self.mesh.get_group(dim))


def take_slice(cargo: Cargo, mesh: DeviceMesh) -> None:
    """Fill this rank's part from its own copy of the full tensor, without communication."""
    take_part(cargo, Coordinate.of(mesh))


def take_part(cargo: Cargo, here: Coordinate) -> None:
    """As `take_slice`, for a rank at a place that is known."""
    assert cargo.source is not None
    part, target = cargo.layout.part(here), cargo.target.view(-1)
    step = max(1, LARGE // cargo.dtype.itemsize)  # what is not a view is copied on its way
    for start in range(0, part.numel, step):
        target[start : start + step].copy_(part.of(cargo.source, start, start + step))


@torch.no_grad()
def deliver(
    cargoes: Mapping[int, Sequence[Cargo]], mesh: DeviceMesh, bucket_bytes: int, stage: Stage | None = None
) -> int:
    """Bring each cargo from its source rank to the targets on all ranks of the mesh.

    Args:
        cargoes: source rank (global) to its cargoes; the same, in the same order, on every rank.
        bucket_bytes: most bytes of one source that are on their way at one time.
        stage: where to count what has been delivered.

    Returns:
        Bytes that this rank has sent and received.
    """
    ranks = Ranks.of(mesh)
    schedules = {
        source: list(in_buckets(pieces_of(items, ranks, bucket_bytes), ranks.parts, bucket_bytes))
        for source, items in cargoes.items()
    }
    stage = stage or Stage("delivery")
    stage.expect(sum(size_of(bucket, ranks.parts) for buckets in schedules.values() for bucket in buckets))
    moved = 0
    for step in zip_longest(*schedules.values()):
        for cut in (True, False):
            bucket = {
                source: [piece for piece in pieces if piece.cargo.cut is cut]
                for source, pieces in zip(schedules, step, strict=True)
                if pieces
            }
            moved += _scatter(bucket, ranks) if cut else _broadcast(bucket, ranks)
        stage.advance(sum(size_of(pieces, ranks.parts) for pieces in step if pieces))
    return moved


def pieces_of(cargoes: Sequence[F], ranks: Ranks, limit: int) -> Iterator[Piece[F]]:
    """Cut every cargo so that no piece, counted over all the ranks it goes to, exceeds the limit."""
    largest_at = Coordinate.in_grid(ranks.table, int(ranks.table[0, 0, 0]))
    for cargo in cargoes:
        largest = cargo.layout.part(largest_at).numel
        step = max(1, limit // (cargo.dtype.itemsize * (ranks.parts if cargo.cut else 1)))
        for start in range(0, largest, step):
            yield Piece(cargo, start, min(start + step, largest))


def in_buckets(pieces: Iterator[Piece[F]], parts: int, limit: int) -> Iterator[list[Piece[F]]]:
    """Gather consecutive pieces into buckets within the limit."""
    bucket: list[Piece[F]] = []
    size = 0
    for piece in pieces:
        nbytes = size_of([piece], parts)
        if bucket and size + nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append(piece)
        size += nbytes
    if bucket:
        yield bucket


def size_of(pieces: Sequence[Piece[F]], parts: int) -> int:
    """Bytes of pieces, over all the ranks of a replica that they go to."""
    copies = ((piece, parts if piece.cargo.cut else 1) for piece in pieces)
    return sum((piece.stop - piece.start) * piece.cargo.dtype.itemsize * count for piece, count in copies)


def _scatter(bucket: dict[int, list[Piece[Cargo]]], ranks: Ranks) -> int:
    """One bucket of pieces that are cut: from each source to its replica, then across the replicas."""
    sends: list[dist.P2POp] = []
    arrivals: list[tuple[int, _Parcel]] = []
    moved = 0
    for source, pieces in bucket.items():
        replica = ranks.replica(source)
        mine = _Parcel.into(pieces, ranks)
        arrivals.append((replica, mine))
        if source == ranks.me:
            for peer in ranks.table[replica].flatten().tolist():
                parcel = _Parcel.out_of(pieces, ranks, peer)
                if peer == ranks.me:
                    mine.copy_from(parcel)
                else:
                    sends += [dist.P2POp(dist.isend, message, peer) for message in parcel.messages]
                    moved += parcel.nbytes
        elif replica == ranks.replica(ranks.me):
            sends += [dist.P2POp(dist.irecv, message, source) for message in mine.messages]
            moved += mine.nbytes
    if sends:
        for work in dist.batch_isend_irecv(sends):
            work.wait()
    _, shard, tp = (ranks.table == ranks.me).nonzero()[0].tolist()
    for replica, parcel in arrivals:
        if len(ranks.table) > 1:
            for message in parcel.messages:
                ranks.spread(message, int(ranks.table[replica, shard, tp]), dims=1)
            moved += parcel.nbytes
        parcel.unpack()
    return moved


def _broadcast(bucket: dict[int, list[Piece[Cargo]]], ranks: Ranks) -> int:
    """One bucket of whole pieces: from each source to all ranks, dimension by dimension of the mesh."""
    moved = 0
    for source, pieces in bucket.items():
        parcel = _Parcel.into(pieces, ranks)
        if source == ranks.me:
            parcel.copy_from(_Parcel.out_of(pieces, ranks, ranks.me))
        for message in parcel.messages:
            ranks.spread(message, source, dims=ranks.mesh.ndim)
        moved += parcel.nbytes
        parcel.unpack()
    return moved


@dataclass
class _Parcel:
    """The messages that carry one rank's part of a bucket: large pieces by themselves, small packed."""

    messages: list[torch.Tensor]
    staged: list[torch.Tensor]
    """Where the contents of the last message, the packed one, belong when it has arrived."""

    @classmethod
    def into(cls, pieces: Sequence[Piece[Cargo]], ranks: Ranks) -> _Parcel:
        """Messages that are the targets' own storage, or will be unpacked into it."""
        large, small = _sort(pieces, [as_bytes(_target(piece)) for piece in pieces], ranks)
        size = sum(part.numel() for part in small)
        packed = torch.empty(size, dtype=torch.uint8, device=ranks.device)
        return cls([*large, packed] if small else large, small)

    @classmethod
    def out_of(cls, pieces: Sequence[Piece[Cargo]], ranks: Ranks, peer: int) -> _Parcel:
        """Messages for a rank, views of the source's storage where they can be."""
        at = Coordinate.in_grid(ranks.table, peer)
        parts = [as_bytes(_source(piece, at)) for piece in pieces]
        large, small = _sort(pieces, parts, ranks)
        packed = [torch.cat([part.to(ranks.device) for part in small])] if small else []
        return cls([*(part.to(ranks.device) for part in large), *packed], [])

    @property
    def nbytes(self) -> int:
        """Bytes in all messages."""
        return sum(message.numel() for message in self.messages)

    def copy_from(self, other: _Parcel) -> None:
        """Take the contents of a parcel from this same rank."""
        for mine, theirs in zip(self.messages, other.messages, strict=True):
            mine.copy_(theirs)

    def unpack(self) -> None:
        """Put the packed message's contents where they belong."""
        if self.staged:
            parts = self.messages[-1].split([part.numel() for part in self.staged])
            for part, home in zip(parts, self.staged, strict=True):
                home.copy_(part)


def _sort(
    pieces: Sequence[Piece[Cargo]], parts: Sequence[torch.Tensor], ranks: Ranks
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Parts that travel alone, and parts that are packed; sender and receiver sort alike."""
    large: list[torch.Tensor] = []
    small: list[torch.Tensor] = []
    for piece, part in zip(pieces, parts, strict=True):
        alone = part.numel() >= LARGE and piece.cargo.target.device.type == ranks.device.type
        if part.numel():
            (large if alone else small).append(part)
    return large, small


def _target(piece: Piece[Cargo]) -> torch.Tensor:
    flat = piece.cargo.target.view(-1)
    return flat[min(piece.start, flat.numel()) : min(piece.stop, flat.numel())]


def _source(piece: Piece[Cargo], at: Coordinate) -> torch.Tensor:
    cargo = piece.cargo
    assert cargo.source is not None
    return cargo.layout.part(at).of(cargo.source, piece.start, piece.stop).to(cargo.dtype)
