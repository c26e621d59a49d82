"""What travels between ranks, and how it is packed.

A *cargo* is one tensor on its way. It is cut into *slices* of bounded size, which are packed into *buckets*
by the same schedule on every rank. Within a bucket a slice of a megabyte or more is a message of its own,
sent directly from the source's storage into the target's; smaller ones share one message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Generic, TypeVar

import torch

from composer_dist.distributed.mesh.layout import Coordinate, Layout
from composer_dist.distributed.mesh.mesh import Mesh
from composer_dist.tensors.parts import as_bytes

LARGE = 1 << 20
"""Slices of at least this many bytes are sent as separate messages."""


@dataclass
class Freight:
    """A tensor that travels in slices."""

    name: str
    layout: Layout
    dtype: torch.dtype

    @property
    def cut(self) -> bool:
        """Whether ranks get different parts, or everything."""
        return self.layout.cut

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


@dataclass(frozen=True)
class Slice(Generic[F]):
    """The elements [start, stop) of each rank's part of a cargo, in row-major order."""

    cargo: F
    start: int
    stop: int
    copies: int
    """How many ranks of a replica get elements of their own."""

    @property
    def nbytes(self) -> int:
        """Over all the ranks of a replica that it goes to."""
        return (self.stop - self.start) * self.cargo.dtype.itemsize * self.copies


def slices_of(cargoes: Sequence[F], at: Coordinate, limit: int) -> Iterator[Slice[F]]:
    """Cut every cargo so that no slice, counted over all the ranks it goes to, exceeds the limit.

    Args:
        at: any coordinate of the mesh.
    """
    for cargo in cargoes:
        largest = cargo.layout.part(replace(at, shard=0, tp=0)).numel
        copies = at.shards * at.tps if cargo.cut else 1
        step = max(1, limit // (cargo.dtype.itemsize * copies))
        for start in range(0, largest, step):
            yield Slice(cargo, start, min(start + step, largest), copies)


T = TypeVar("T")


def in_buckets(items: Iterable[T], nbytes: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Group consecutive items so that each group stays within the limit; a larger item is alone."""
    bucket: list[T] = []
    size = 0
    for item in items:
        if bucket and size + nbytes(item) > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append(item)
        size += nbytes(item)
    if bucket:
        yield bucket


@dataclass
class Parcel:
    """The messages that carry one rank's part of a bucket: large slices alone, small ones packed."""

    messages: list[torch.Tensor]
    staged: list[torch.Tensor]
    """Where the contents of the last message, the packed one, belong when it has arrived."""

    @classmethod
    def into(cls, slices: Sequence[Slice[Cargo]], mesh: Mesh) -> Parcel:
        """Messages that are the targets' own storage, or will be unpacked into it."""
        large, small = _sort(slices, [as_bytes(_target(one)) for one in slices], mesh)
        size = sum(part.numel() for part in small)
        packed = torch.empty(size, dtype=torch.uint8, device=mesh.device)
        return cls([*large, packed] if small else large, small)

    @classmethod
    def out_of(cls, slices: Sequence[Slice[Cargo]], mesh: Mesh, peer: int) -> Parcel:
        """Messages for a rank, views of the source's storage where they can be."""
        at = mesh.at(peer)
        parts = [as_bytes(_source(one, at)) for one in slices]
        large, small = _sort(slices, parts, mesh)
        packed = [torch.cat([part.to(mesh.device) for part in small])] if small else []
        return cls([*(part.to(mesh.device) for part in large), *packed], [])

    @property
    def nbytes(self) -> int:
        """Bytes in all messages."""
        return sum(message.numel() for message in self.messages)

    def copy_from(self, other: Parcel) -> None:
        """Take the contents of a parcel from this same rank."""
        for mine, theirs in zip(self.messages, other.messages, strict=True):
            mine.copy_(theirs)

    def unpack(self) -> None:
        """Put the packed message's contents where they belong."""
        if self.staged:
            parts = self.messages[-1].split([part.numel() for part in self.staged])
            for part, home in zip(parts, self.staged, strict=True):
                home.copy_(part)


def message_sizes(slices: Sequence[Slice[Freight]], at: Coordinate) -> list[int]:
    """The bytes of the messages that carry the part of a rank at a coordinate, as `Parcel` has them."""
    sizes = []
    for one in slices:
        numel = one.cargo.layout.part(at).numel
        sizes.append((min(one.stop, numel) - min(one.start, numel)) * one.cargo.dtype.itemsize)
    packed = sum(size for size in sizes if size < LARGE)
    return [*(size for size in sizes if size >= LARGE), *([packed] if packed else [])]


def _sort(
    slices: Sequence[Slice[Cargo]], parts: Sequence[torch.Tensor], mesh: Mesh
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Parts that travel alone, and parts that are packed; sender and receiver sort alike."""
    large: list[torch.Tensor] = []
    small: list[torch.Tensor] = []
    for one, part in zip(slices, parts, strict=True):
        alone = part.numel() >= LARGE and one.cargo.target.device.type == mesh.device.type
        if part.numel():
            (large if alone else small).append(part)
    return large, small


def _target(one: Slice[Cargo]) -> torch.Tensor:
    flat = one.cargo.target.view(-1)
    return flat[min(one.start, flat.numel()) : min(one.stop, flat.numel())]


def _source(one: Slice[Cargo], at: Coordinate) -> torch.Tensor:
    cargo = one.cargo
    assert cargo.source is not None
    return cargo.layout.part(at).of(cargo.source, one.start, one.stop).to(cargo.dtype)
