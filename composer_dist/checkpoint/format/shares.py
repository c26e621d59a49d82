"""Divides the tensors among the ranks: each box is written once, and replicas are spread evenly.

torch.distributed.checkpoint stores boxes. DTensor computes wrong offsets for uneven tensor parallelism and
for groups within a dimension, so the boxes come from our layouts.

The first rank collects the list of boxes and divides them. If the same boxes are saved again, which the ranks
detect by digests, the previous plan is reused.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from composer_dist import _torch
from composer_dist.distributed.mesh.layout import Layout
from composer_dist.distributed.mesh.mesh import Mesh
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.errors import CheckpointValueError
from composer_dist.tensors.inner import dense, local_part
from composer_dist.tensors.parts import Dims, Part, covers, rectangles

_KEPT = 8
"""Plans to remember: a run has few kinds of checkpoints."""
_plans: dict[str, tuple[str, list[int]]] = {}
"""Digest of this rank's boxes, to the digest of all ranks' boxes and this rank's share."""


@dataclass(frozen=True)
class LocalBox:
    """A box of a tensor that this rank holds."""

    name: str
    start: Dims
    """Its first corner in the full tensor."""
    values: Tensor
    """A view of this rank's part; its shape is the box's."""

    @property
    def key(self) -> tuple[str, Dims]:
        """Equal only for replicas of the same box."""
        return self.name, self.start


def boxes_of(name: str, tensor: Tensor) -> Iterator[LocalBox]:
    """The boxes of this rank's part of a tensor; a tensor with a codec is decoded."""
    tensor = tensor.detach()
    local = dense(local_part(tensor)).to(tensor.dtype).resolve_conj().resolve_neg()
    if not isinstance(tensor, DTensor):
        if tensor.numel():
            yield LocalBox(name, (0,) * tensor.ndim, local)
        return
    layout = Layout.known(tensor)
    if tensor.device_mesh.get_coordinate() is None or not local.numel():
        return
    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointValueError(
            f"{name} is a DTensor of partial sums, which no rank has in full; redistribute it first."
        )
    if layout is None:  # sharded by the user, in a way that torch supports
        _, start = _torch.local_box(tensor)
        yield LocalBox(name, tuple(start), local)
        return
    at = Mesh.of(tensor).here
    part, flat, first = layout.part(at), local.reshape(-1), 0
    extents = [high - low for low, high in part.window]
    for corner, sizes in rectangles(extents, part.first, part.last):
        start = tuple(low + index for (low, _), index in zip(part.window, corner, strict=True))
        values = flat[first : first + prod(sizes)].view(sizes)
        first += prod(sizes)
        for at_corner, box in _ungrouped(start, values, layout.tp_dim, part):
            yield LocalBox(name, at_corner, box)


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


def choose(agreement: Agreement, pieces: Sequence[LocalBox], shapes: Mapping[str, Dims]) -> list[LocalBox]:
    """The pieces that this rank writes; every rank calls it with the pieces that it holds.

    Args:
        shapes: the full shape of every tensor.

    Raises:
        CheckpointValueError: the ranks save different tensors, or their pieces do not add up to them.
    """
    mine = {
        "shapes": {name: list(shape) for name, shape in shapes.items()},
        "pieces": [[p.name, list(p.start), list(p.values.shape), p.values.nbytes] for p in pieces],
    }
    digest = _digest(mine)

    def is_known(findings: list[list[str]]) -> bool:
        every = _digest([digest for digest, _ in findings])
        return all(plan == every for _, plan in findings)

    plan, share = _plans.get(digest, ("", []))
    if not agreement.reach("the plan of the checkpoint", [digest, plan], is_known):
        dealt = agreement.reach("the pieces of the checkpoint", mine, deal)
        share = dealt["shares"][agreement.ranks.index(agreement.rank)]
        while len(_plans) >= _KEPT:
            del _plans[next(iter(_plans))]
        _plans[digest] = dealt["plan"], share
    return [pieces[number] for number in share]


def deal(held: list[dict[str, Any]]) -> dict[str, Any]:
    """Assign every piece to one of its holders: the largest first, to the rank with the least so far.

    Returns:
        For each rank the numbers of its pieces, in its own order, and the digest of all ranks' pieces.

    Raises:
        CheckpointValueError: the ranks save different tensors, or their pieces do not add up to them.
    """
    shapes = held[0]["shapes"]
    for rank, one in enumerate(held):
        if odd := sorted(n for n in {*shapes, *one["shapes"]} if shapes.get(n) != one["shapes"].get(n)):
            raise CheckpointValueError(
                f"Ranks 0 and {rank} save different tensors: {', '.join(odd[:10])}. Every rank must save the "
                "same names and shapes; a filter must select the same on every rank."
            )
    holders: dict[tuple[str, tuple[int, ...]], list[tuple[int, int]]] = {}
    sizes: dict[tuple[str, tuple[int, ...]], int] = {}
    boxes: dict[str, list[tuple[Dims, Dims]]] = {name: [] for name in shapes}
    for rank, one in enumerate(held):
        for number, (name, start, box, nbytes) in enumerate(one["pieces"]):
            key = name, tuple(start)
            if key not in holders:
                boxes[name].append((tuple(start), tuple(box)))
            holders.setdefault(key, []).append((rank, number))
            sizes[key] = nbytes
    if odd := sorted(name for name, shape in shapes.items() if not covers(boxes[name], tuple(shape))):
        raise CheckpointValueError(f"The ranks' parts do not add up to these tensors: {', '.join(odd)}.")
    loads = [0] * len(held)
    shares: list[list[int]] = [[] for _ in held]
    for key in sorted(holders, key=lambda key: (len(holders[key]) > 1, -sizes[key], key)):
        rank, number = min(holders[key], key=lambda place: (loads[place[0]], place[0]))
        loads[rank] += sizes[key]
        shares[rank].append(number)
    plan = _digest([_digest(one) for one in held])
    return {"shares": [sorted(share) for share in shares], "plan": plan}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def own(values: Tensor) -> Tensor:
    """The same values on the CPU, contiguous, in a storage of their size; copied only if necessary."""
    values = values.detach().to("cpu").contiguous()
    if values.untyped_storage().nbytes() == values.nbytes:
        return values
    first = int(values.storage_offset()) * values.itemsize
    storage = values.untyped_storage()[first : first + values.nbytes]
    return torch.empty(0, dtype=values.dtype).set_(storage, 0, values.shape, values.stride())
