"""Compares what ranks hold in common: parameters, buffers and optimizer state, by hash.

Ranks hold the same *part* of a tensor if they have the same coordinates in the mesh dimensions over which
it is cut: all of them under DDP, the ranks of "dp_replicate" under HSDP, and all for what stays whole.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composer_dist import _torch
from composer_dist.distributed import prepared
from composer_dist.distributed.mesh.dimensions import DIMENSIONS, FLATTENED
from composer_dist.distributed.mesh.mesh import Mesh
from composer_dist.distributed.optimizers.follow import names_by_id
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.distributed.training.average_gradients import exchange, groups_of
from composer_dist.structure.structure import Structure
from composer_dist.tensors.fingerprint import fingerprint
from composer_dist.tensors.inner import inner_tensors, local_part
from composer_dist.wording import ranks_named

_CLASSES = 8
"""Ways to be cut for which ranks compare one sum each; further ones share the last."""
_MASK = (1 << 62) - 1
NBYTES = 16 * _CLASSES
"""Bytes that each rank sends in `differs`."""


@dataclass(frozen=True)
class Copy:
    """This rank's copy of a part of a tensor."""

    what: str
    """"parameter", "buffer" or "optimizer state"."""
    cut: str
    """The mesh dimensions over which it is cut; empty for what is whole."""
    part: int
    """Which part, counted over these dimensions."""
    tensor: Tensor

    def hash(self) -> int:
        """Of the values, 62 bits."""
        inner = inner_tensors(self.tensor)
        parts = [local_part(one) for one in inner.values()] if inner else [local_part(self.tensor)]
        total = 0
        for one in parts:
            total = total * 31 + fingerprint(one)
        return total & _MASK


def copies(
    structure: Structure, optimizers: Sequence[Optimizer], versions: Mapping[str, int] | None = None
) -> Iterator[tuple[str, Copy]]:
    """Name and copy of everything that ranks hold in common.

    This omits parameters that DDP leaves to each rank, tensors that their user has sharded, running
    statistics of batch norms, which follow rank 0's before a forward only, and context parallelism's tables.

    Args:
        versions: of the buffers by name, at an earlier time; those that code has changed since are left out,
            because a forward changes them by each rank's data.
    """
    known = prepared.of(structure.modules[""])
    plan, mesh = (known.plan, known.mesh) if known else (None, None)
    ignored = set(plan.replication.ignored) if plan and plan.replication else set()
    tables = set(map(id, known.tables)) if known else set()
    names = set(mesh.device_mesh.mesh_dim_names or ()) if mesh else set()
    cuts: dict[str, tuple[str, int]] = {}
    for name, held in structure.tensors.items():
        tensor = held.get()
        cut = _cut(tensor)
        if name in ignored or tensor.is_meta or id(tensor) in tables or cut is None:
            continue
        if cut[0] and not all(dim in names or dim in _OURS for dim in cut[0].split()):
            continue
        if held.info.kind == "parameter":
            cuts[name] = cut
            yield name, Copy("parameter", *cut, tensor)
        elif not any(isinstance(place.module, _torch.AnyBatchNorm) for place in held.places) and (
            versions is None or versions.get(name) == _torch.version(tensor)
        ):
            yield name, Copy("buffer", *cut, tensor)
    known_names = names_by_id(structure)
    for number, optimizer in enumerate(optimizers):
        for parameter, state in optimizer.state.items():
            name = known_names.get(id(parameter), "")
            for key, value in state.items() if name in cuts else ():
                if isinstance(value, Tensor):
                    place = _cut(value) if isinstance(value, DTensor) else cuts[name]
                    label = f"{name} {key}" if len(optimizers) == 1 else f"{name} {key} of optimizer {number}"
                    yield label, Copy("optimizer state", *(place or cuts[name]), value)


_OURS = frozenset({*DIMENSIONS, FLATTENED})


def _cut(tensor: Tensor) -> tuple[str, int] | None:
    """The dimensions over which a tensor is cut, and the number of this rank's part; None if unknown."""
    if not isinstance(tensor, DTensor):
        return "", 0
    mesh, here = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if here is None or any(placement.is_partial() for placement in tensor.placements):
        return None
    names = mesh.mesh_dim_names or tuple(f"dimension {index}" for index in range(mesh.ndim))
    dims = [dim for dim, place in enumerate(tensor.placements) if not place.is_replicate()]
    part = 0
    for dim in dims:
        part = part * mesh.size(dim) + here[dim]
    return " ".join(sorted(names[dim] for dim in dims)), part


def differs(found: Mapping[str, Copy], mesh: Mesh | None) -> bool:
    """Whether any rank's copies differ from another's: one collective of `NBYTES` per mesh dimension."""
    cuts = sorted({one.cut for one in found.values()})
    sums = [[0, 0] for _ in range(_CLASSES)]
    for number, (name, one) in enumerate(sorted(found.items())):
        place = sums[min(cuts.index(one.cut), _CLASSES - 1)]
        place[0] = (place[0] * 31 + one.part + 1) & _MASK
        place[1] = (place[1] * 0x5851F42D4C957F2D + one.hash() + number + len(name)) & _MASK
    row = torch.tensor([[number for pair in sums for number in pair]], dtype=torch.int64)
    rows = exchange(row, groups_of(mesh.device_mesh) if mesh else ()).tolist()
    for index in range(_CLASSES):
        seen: dict[int, int] = {}
        for row in rows:
            part, total = row[2 * index : 2 * index + 2]
            if seen.setdefault(part, total) != total:
                return True
    return False


def find(found: Mapping[str, Copy], agreement: Agreement) -> list[list[str]]:
    """Kind, name and description of every tensor whose copies differ, the same on every rank.

    All ranks call it. It sends each tensor's name and two numbers. What most ranks hold is taken to be right.
    """
    mine = {name: (one.what, one.cut, one.part, one.hash()) for name, one in found.items()}

    def compare(everywhere: list[dict[str, tuple[str, str, int, int]]]) -> list[list[str]]:
        wrong = []
        for name in dict.fromkeys(name for one in everywhere for name in one):
            what = next(one[name][0] for one in everywhere if name in one)
            by_part: defaultdict[Any, list[tuple[int, int]]] = defaultdict(list)
            for rank, one in zip(agreement.ranks, everywhere, strict=True):
                _, cut, part, number = one.get(name, (what, "", 0, -1))
                by_part[cut, part].append((rank, number))
            wrong += [[what, name, text] for held in by_part.values() if (text := _minority(held))]
        return wrong

    result: list[list[str]] = agreement.reach("the comparison of replicas", mine, compare)
    return result


def _minority(held: Sequence[tuple[int, int]]) -> str:
    """Which ranks differ from most of those that hold the same part; empty if none does."""
    counts = Counter(number for _, number in held).most_common()
    if len(counts) == 1:
        return ""
    ranks = [rank for rank, _ in held]
    if counts[0][1] == counts[1][1]:
        return f"{ranks_named(ranks)} hold different values, and no majority shows which are right"
    others = [rank for rank, number in held if number != counts[0][0]]
    most = [rank for rank in ranks if rank not in others]
    return f"{ranks_named(others)} differ{'s' * (len(others) == 1)} from {ranks_named(most)}"


def buffer_versions(model: nn.Module) -> dict[str, int]:
    """How often code has changed each buffer in place, by name; a flipped bit does not count."""
    return {name: _torch.version(one) for name, one in prepared.named_buffers_canonical(model)}
