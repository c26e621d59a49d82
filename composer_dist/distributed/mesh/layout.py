"""Which elements of a tensor lie on which rank.

A rank's *part* of a tensor is what its local tensor holds: first tensor parallelism opens a *window* on
the tensor (a chunk of one dimension, or of each of several equal groups in it, as in a fused
query-key-value matrix), then the window's rows are cut among the shards. In row-major order of the
window a part is one range of elements, so it can be sent, read from memory or from a file piece by
piece; in the full tensor it is one *run* of elements, or many of equal length.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Self

import torch
from torch.distributed.tensor import DTensor, Shard

from composer_dist.distributed.mesh.dimensions import roles
from composer_dist.errors import ParallelismValueError
from composer_dist.tensors.parts import Part, chunk


@dataclass(frozen=True)
class Coordinate:
    """A rank's place in a mesh, without the replica: replicas hold the same parts."""

    shard: int = 0
    shards: int = 1
    """Ranks among which rows are cut; context-parallel ranks count."""
    tp: int = 0
    tps: int = 1


@dataclass(frozen=True)
class Layout:
    """How a tensor is cut; a tensor that is not cut is whole on every rank."""

    shape: tuple[int, ...]
    """Of the full tensor."""
    rows: bool = False
    """Whether rows are cut among the shards."""
    tp_dim: int | None = None
    """The dimension that is cut among the tensor-parallel ranks, first."""
    tp_groups: int = 1
    """Equal groups in that dimension, each of which is cut."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Self:
        """The layout of a tensor, cut or whole."""
        shape = tuple(tensor.shape)
        if not isinstance(tensor, DTensor):
            return cls(shape)
        rows, tp_dim, tp_groups = False, None, 1
        tp = roles(tensor.device_mesh).get("tp")
        for index, placement in enumerate(tensor.placements):
            dim = getattr(placement, "dim", None)
            if dim is not None and index == tp:
                tp_dim, tp_groups = dim, getattr(placement, "split_factor", 1)
            elif dim is not None:
                rows = True
        return cls(shape, rows, tp_dim, tp_groups)

    @property
    def cut(self) -> bool:
        """Whether ranks hold different parts, or everything."""
        return self.rows or self.tp_dim is not None

    @classmethod
    def known(cls, tensor: torch.Tensor) -> Self | None:
        """As `of`; None for a DTensor that its user has cut in a way that this library never does."""
        if not isinstance(tensor, DTensor):
            return cls.of(tensor)
        mesh = tensor.device_mesh
        try:
            dims = roles(mesh)
        except ParallelismValueError:
            return None
        layout, tp = cls.of(tensor), dims.get("tp")
        rows = {i: p for i, p in enumerate(tensor.placements) if i != tp and not p.is_replicate()}
        strided = [not isinstance(placement, Shard) for placement in rows.values()]
        if len(rows) > 1 or any(getattr(placement, "dim", None) != 0 for placement in rows.values()):
            return None
        shards = [dims[name] for name in ("dp_shard", "cp") if name in dims]
        if rows and [i for i in shards if mesh.size(i) > 1] != [i for i in rows if mesh.size(i) > 1]:
            return None
        if layout.tp_dim is None:
            odd = any(strided) or (tp is not None and not tensor.placements[tp].is_replicate())
        else:  # both cut rows: tensor parallelism first, which torch marks by the kind of placement
            odd = strided == [layout.tp_dim != 0]
        return None if odd else layout

    def like(self, shape: tuple[int, ...]) -> Layout:
        """The layout of a tensor that belongs to this one, such as optimizer state.

        It is cut alike, except that a dimension of another size (1, say) stays whole.
        """
        same = [a == b for a, b in zip(shape, self.shape, strict=True)]
        keep = self.tp_dim is not None and same[self.tp_dim]
        return replace(self, shape=shape, rows=self.rows and same[0], tp_dim=self.tp_dim if keep else None)

    def local_shape(self, at: Coordinate) -> tuple[int, ...]:
        """The shape of the local tensor at a coordinate."""
        sizes = list(self.shape)
        if self.tp_dim is not None:
            first, last = chunk(sizes[self.tp_dim] // self.tp_groups, at.tps, at.tp)
            sizes[self.tp_dim] = (last - first) * self.tp_groups
        if self.rows:
            first, last = chunk(sizes[0], at.shards, at.shard)
            sizes[0] = last - first
        return tuple(sizes)

    def part(self, at: Coordinate) -> Part:
        """What the rank at a coordinate holds."""
        shape = self.shape
        window = [(0, size) for size in shape]
        if (dim := self.tp_dim) is not None:
            size = shape[dim] // self.tp_groups
            shape = (*shape[:dim], self.tp_groups, size, *shape[dim + 1 :])
            window[dim : dim + 1] = [(0, self.tp_groups), chunk(size, at.tps, at.tp)]
        sizes = [last - first for first, last in window]
        numel = prod(sizes)
        if not self.rows:
            return Part(shape, tuple(window), 0, numel)
        rows = sizes[0] * sizes[1] if dim == 0 else sizes[0]
        first, last = chunk(rows, at.shards, at.shard)
        row = numel // rows if rows else 0
        return Part(shape, tuple(window), first * row, last * row)


def padded_numel(layout: Layout, at: Coordinate) -> int:
    """The elements of a part with those that pad it, so that all shards have the size of the first."""
    return prod(layout.local_shape(replace(at, shard=0)))
