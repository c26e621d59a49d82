"""Weights from the rank that has them to the shards of all.

A *cargo* is one tensor on its way from a source rank to every rank of the mesh: each rank receives
only its rows of a sharded tensor, and all of a whole one (buffers, parameters that stay plain). The
schedule is computed alike on every rank: cargoes are cut into *pieces*, pieces are packed into
*buckets* of bounded size. Within a bucket a piece of a megabyte or more travels straight from the
source's storage into the target's, smaller ones share a staging buffer. On a 2-D mesh a piece goes to
one replica only, which then replicates what it has received.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

_LARGE = 1 << 20
"""Bytes from which a piece is worth a message of its own."""
_MASK = (1 << 64) - 1


@dataclass
class Cargo:
    """One tensor to deliver."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sharded: bool
    """Whether each rank gets its rows of dimension 0, or everything."""
    target: torch.Tensor
    """Where this rank's part goes: contiguous, `(rows, ...)`."""
    source: torch.Tensor | None = None
    """The full tensor, on the source rank only; any layout, any device, any dtype."""


@dataclass(frozen=True)
class _Piece:
    """The elements [start, stop) of each rank's part of a cargo, in row-major order."""

    cargo: Cargo
    start: int
    stop: int


@dataclass(frozen=True)
class Ranks:
    """The mesh as a table of global ranks: `(replicas, shards)`."""

    table: list[list[int]]
    replica: int
    shard: int
    shard_group: dist.ProcessGroup | None
    replica_group: dist.ProcessGroup | None
    device: torch.device
    """Where the groups' messages must lie."""

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Ranks:
        """Read a 1-D (shard) or 2-D (replicate, shard) mesh."""
        coordinate = mesh.get_coordinate() or [0]
        return cls(
            table=mesh.mesh.view(-1, mesh.size(mesh.ndim - 1)).tolist(),
            replica=coordinate[0] if mesh.ndim == 2 else 0,
            shard=coordinate[-1],
            shard_group=mesh.get_group(mesh.ndim - 1),
            replica_group=mesh.get_group(0) if mesh.ndim == 2 else None,
            device=device_of(mesh),
        )

    @property
    def shards(self) -> int:
        """Ranks that share one replica."""
        return len(self.table[0])

    def find(self, rank: int) -> tuple[int, int]:
        """Replica and shard of a global rank."""
        return next((i, row.index(rank)) for i, row in enumerate(self.table) if rank in row)


def device_of(mesh: DeviceMesh) -> torch.device:
    """This rank's device of the mesh's type."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def rows_of(rows: int, shards: int, shard: int) -> tuple[int, int]:
    """The rows [first, last) of dimension 0 that a shard holds, as `torch.chunk` cuts them."""
    size = -(-rows // shards)
    return min(shard * size, rows), min((shard + 1) * size, rows)


def elements_of(cargo: Cargo, shards: int, shard: int) -> tuple[int, int]:
    """The elements [first, last) of the full tensor that a shard holds, in row-major order."""
    numel = torch.Size(cargo.shape).numel()
    if not cargo.sharded:
        return 0, numel
    row = numel // cargo.shape[0]
    first, last = rows_of(cargo.shape[0], shards, shard)
    return first * row, last * row


def take_slice(cargo: Cargo, mesh: DeviceMesh) -> None:
    """Fill this rank's part from its own copy of the full tensor, without communication."""
    ranks = Ranks.of(mesh)
    assert cargo.source is not None
    part = cargo.source.detach()
    if cargo.sharded:
        first, last = rows_of(cargo.shape[0], ranks.shards, ranks.shard)
        part = part[first:last]
    cargo.target.copy_(part)


@torch.no_grad()
def deliver(cargoes: Mapping[int, Sequence[Cargo]], mesh: DeviceMesh, bucket_bytes: int) -> int:
    """Bring each cargo from its source rank to the targets on all ranks of the mesh.

    Args:
        cargoes: source rank (global) to its cargoes; the same, in the same order, on every rank.
        bucket_bytes: most bytes of one source that are on their way at one time.

    Returns:
        Bytes that this rank has sent and received.
    """
    ranks = Ranks.of(mesh)
    schedules = {
        source: _buckets(_pieces(items, ranks.shards, bucket_bytes), ranks.shards, bucket_bytes)
        for source, items in cargoes.items()
    }
    moved = 0
    for step in zip_longest(*schedules.values()):
        for sharded in (True, False):
            bucket = {
                source: [piece for piece in pieces if piece.cargo.sharded is sharded]
                for source, pieces in zip(schedules, step, strict=True)
                if pieces
            }
            moved += _scatter(bucket, ranks) if sharded else _broadcast(bucket, ranks)
    return moved


def _pieces(cargoes: Sequence[Cargo], shards: int, limit: int) -> Iterator[_Piece]:
    """Cut every cargo so that no piece, counted over all the ranks it goes to, exceeds the limit."""
    for cargo in cargoes:
        largest = elements_of(cargo, shards, 0)[1]
        copies = shards if cargo.sharded else 1
        step = max(1, limit // (cargo.dtype.itemsize * copies))
        for start in range(0, largest, step):
            yield _Piece(cargo, start, min(start + step, largest))


def _buckets(pieces: Iterator[_Piece], shards: int, limit: int) -> Iterator[list[_Piece]]:
    """Gather consecutive pieces into buckets within the limit."""
    bucket: list[_Piece] = []
    size = 0
    for piece in pieces:
        copies = shards if piece.cargo.sharded else 1
        nbytes = (piece.stop - piece.start) * piece.cargo.dtype.itemsize * copies
        if bucket and size + nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append(piece)
        size += nbytes
    if bucket:
        yield bucket


def _scatter(bucket: dict[int, list[_Piece]], ranks: Ranks) -> int:
    """One bucket of sharded pieces: from each source to its replica, then across the replicas."""
    sends: list[dist.P2POp] = []
    arrivals: list[tuple[int, _Parcel]] = []
    me = ranks.table[ranks.replica][ranks.shard]
    moved = 0
    for source, pieces in bucket.items():
        replica, _ = ranks.find(source)
        mine = _Parcel.into(pieces, ranks)
        arrivals.append((replica, mine))
        if source == me:
            for shard, peer in enumerate(ranks.table[replica]):
                parcel = _Parcel.out_of(pieces, ranks, shard)
                if peer == me:
                    mine.copy_from(parcel)
                else:
                    sends += [dist.P2POp(dist.isend, m, peer, ranks.shard_group) for m in parcel.messages]
                    moved += parcel.nbytes
        elif replica == ranks.replica:
            sends += [dist.P2POp(dist.irecv, m, source, ranks.shard_group) for m in mine.messages]
            moved += mine.nbytes
    if sends:
        for work in dist.batch_isend_irecv(sends):
            work.wait()
    for replica, parcel in arrivals:
        if ranks.replica_group is not None:
            holder = ranks.table[replica][ranks.shard]
            for message in parcel.messages:
                dist.broadcast(message, holder, group=ranks.replica_group)
            moved += parcel.nbytes
        parcel.unpack()
    return moved


def _broadcast(bucket: dict[int, list[_Piece]], ranks: Ranks) -> int:
    """One bucket of whole pieces: from each source to all ranks, replica by replica."""
    moved = 0
    me = ranks.table[ranks.replica][ranks.shard]
    for source, pieces in bucket.items():
        replica, _ = ranks.find(source)
        parcel = _Parcel.into(pieces, ranks)
        if source == me:
            parcel.copy_from(_Parcel.out_of(pieces, ranks, ranks.shard))
        for message in parcel.messages:
            if replica == ranks.replica and ranks.shards > 1:
                dist.broadcast(message, source, group=ranks.shard_group)
            if ranks.replica_group is not None:
                holder = ranks.table[replica][ranks.shard]
                dist.broadcast(message, holder, group=ranks.replica_group)
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
    def into(cls, pieces: Sequence[_Piece], ranks: Ranks) -> _Parcel:
        """Messages that are the targets' own storage, or will be unpacked into it."""
        large, small = _sort(pieces, [_as_bytes(_target(piece)) for piece in pieces], ranks)
        size = sum(part.numel() for part in small)
        packed = torch.empty(size, dtype=torch.uint8, device=ranks.device)
        return cls([*large, packed] if small else large, small)

    @classmethod
    def out_of(cls, pieces: Sequence[_Piece], ranks: Ranks, shard: int) -> _Parcel:
        """Messages for a shard, views of the source's storage where they can be."""
        parts = [_as_bytes(_source(piece, ranks.shards, shard)) for piece in pieces]
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
    pieces: Sequence[_Piece], parts: Sequence[torch.Tensor], ranks: Ranks
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Parts that travel alone, and parts that are packed; sender and receiver sort alike."""
    large: list[torch.Tensor] = []
    small: list[torch.Tensor] = []
    for piece, part in zip(pieces, parts, strict=True):
        alone = part.numel() >= _LARGE and piece.cargo.target.device.type == ranks.device.type
        if part.numel():
            (large if alone else small).append(part)
    return large, small


def _target(piece: _Piece) -> torch.Tensor:
    flat = piece.cargo.target.view(-1)
    return flat[min(piece.start, flat.numel()) : min(piece.stop, flat.numel())]


def _source(piece: _Piece, shards: int, shard: int) -> torch.Tensor:
    assert piece.cargo.source is not None
    first, last = elements_of(piece.cargo, shards, shard)
    start, stop = min(first + piece.start, last), min(first + piece.stop, last)
    return _elements(piece.cargo.source.detach(), start, stop).to(piece.cargo.dtype)


def _elements(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """The elements [start, stop) in row-major order: a view where the layout allows, else a copy."""
    if tensor.is_contiguous():
        return tensor.view(-1)[start:stop]
    if start >= stop:
        return tensor.new_empty(0)
    row = tensor.numel() // tensor.shape[0]
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        return _elements(tensor[last], start - last * row, stop - last * row)
    parts = [tensor[first:last].reshape(-1).contiguous()]
    if start < first * row:
        parts.insert(0, _elements(tensor[first - 1], start - (first - 1) * row, row))
    if stop > last * row:
        parts.append(_elements(tensor[last], 0, stop - last * row))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)


@torch.no_grad()
def fingerprint(tensor: torch.Tensor) -> int:
    """A 64-bit hash of a tensor's shape and bytes, equal on all ranks that hold the same values.

    Bytes are read as integers, multiplied by odd pseudo-random weights and summed modulo 2^64
    (multilinear hashing: Carter and Wegman, 1979), a megabyte at a time, on the tensor's own device.
    """
    tensor, total = tensor.detach(), hash(tuple(tensor.shape))
    weights = _weights(tensor.device)
    step = _LARGE // tensor.dtype.itemsize
    for start in range(0, tensor.numel(), step):
        part = _as_bytes(_elements(tensor, start, min(start + step, tensor.numel())))
        words, rest = part[: len(part) // 8 * 8], part[len(part) // 8 * 8 :]
        words = (words.clone() if words.storage_offset() % 8 else words).view(torch.int64)
        for numbers in (words, rest.to(torch.int64)):
            hashed = (numbers * weights[: numbers.numel()]).sum()
            total = (total * 0x5851F42D4C957F2D + int(hashed) + start) & _MASK
    return total & _MASK


@lru_cache(maxsize=2)
def _weights(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(1 << 62, (_LARGE // 8,), generator=generator, device="cpu")
    return numbers.mul_(2).add_(1).to(device)
