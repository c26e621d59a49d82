"""A tensor's part on this rank, as boxes with their places in the full tensor, ready to be written.

torch.distributed.checkpoint stores boxes. DTensor's own account of where a local tensor lies is wrong for
uneven tensor parallelism and for groups within a dimension, so boxes come from our layouts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from composer_dist import _torch
from composer_dist.distributed.mesh.layout import Coordinate, Layout
from composer_dist.tensors.inner import dense, local_part
from composer_dist.tensors.parts import Dims, Part, rectangles


@dataclass(frozen=True)
class Piece:
    """A box of a tensor."""

    name: str
    start: Dims
    """Its first corner in the full tensor."""
    values: Tensor
    """A view of what this rank holds; its shape is the box's."""

    @property
    def key(self) -> tuple[str, Dims]:
        """What tells it from all other pieces, and not from its replicas."""
        return self.name, self.start


def pieces_of(name: str, tensor: Tensor) -> Iterator[Piece]:
    """What this rank holds of a tensor; nothing if that is empty. What has a codec is decoded."""
    tensor = tensor.detach()
    local = dense(local_part(tensor)).to(tensor.dtype).resolve_conj().resolve_neg()
    if not isinstance(tensor, DTensor):
        if tensor.numel():
            yield Piece(name, (0,) * tensor.ndim, local)
        return
    layout = Layout.known(tensor)
    if tensor.device_mesh.get_coordinate() is None or not local.numel():
        return
    if layout is None:  # cut by the user, in a way that torch understands
        _, start = _torch.local_box(tensor)
        yield Piece(name, tuple(start), local)
        return
    at = Coordinate.of(tensor.device_mesh)
    part, flat, first = layout.part(at), local.reshape(-1), 0
    extents = [high - low for low, high in part.window]
    for corner, sizes in rectangles(extents, part.first, part.last):
        start = tuple(low + index for (low, _), index in zip(part.window, corner, strict=True))
        values = flat[first : first + prod(sizes)].view(sizes)
        first += prod(sizes)
        for at_corner, box in _ungrouped(start, values, layout.tp_dim, part):
            yield Piece(name, at_corner, box)


def _ungrouped(start: Dims, values: Tensor, dim: int | None, part: Part) -> Iterator[tuple[Dims, Tensor]]:
    """Boxes of the tensor from a box of its part, where dimension `dim` is two: groups, and size in each."""
    if dim is None:
        yield start, values
        return
    groups, size = values.shape[dim : dim + 2]
    if groups > 1 and size < part.shape[dim + 1]:
        for group in range(groups):
            one = (*start[:dim], start[dim] + group, *start[dim + 1 :])
            yield from _ungrouped(one, values.narrow(dim, group, 1), dim, part)
    else:
        low = start[dim] * part.shape[dim + 1] + start[dim + 1]
        shape = (*values.shape[:dim], groups * size, *values.shape[dim + 2 :])
        yield (*start[:dim], low, *start[dim + 2 :]), values.reshape(shape)


def own(values: Tensor) -> Tensor:
    """The same values on the CPU, contiguous, in a storage of their own size; copied only if need be."""
    values = values.detach().to("cpu").contiguous()
    if values.untyped_storage().nbytes() == values.nbytes:
        return values
    first = int(values.storage_offset()) * values.itemsize
    storage = values.untyped_storage()[first : first + values.nbytes]
    return torch.empty(0, dtype=values.dtype).set_(storage, 0, values.shape, values.stride())
