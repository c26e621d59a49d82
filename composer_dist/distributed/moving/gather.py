"""Shards to full tensors.

Sharded tensors are cut into slices, and slices are packed into buckets, by the same schedule on every
rank. A bucket costs one collective for each mesh dimension over which anything is cut, however many
tensors are in it, and a rank holds one gathered bucket at a time in addition to the full tensors that it
keeps. Replicas of a shard take no part.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from composer_dist import _torch
from composer_dist.distributed.mesh.layout import Coordinate, Layout
from composer_dist.distributed.mesh.mesh import Mesh
from composer_dist.distributed.moving.messages import Freight, Slice, in_buckets, slices_of
from composer_dist.distributed.ranks.process_group import world_and_rank
from composer_dist.tensors.inner import dense, inner_tensors, local_part, rebuild
from composer_dist.tensors.parts import elements

BUCKET_BYTES = 256 << 20
"""Most bytes of gathered tensors that a rank holds in addition to those that it keeps."""
LEAST_BYTES = 1 << 20
"""Most bytes of a bucket of tensors that are smaller: one collective for many of them."""
_ALIGNED = 16
"""Where a slice begins in a message, so that it can be read as any dtype: multiples of so many bytes."""
_CPU = torch.device("cpu")


@torch.no_grad()
def gather(tensor: Tensor) -> Tensor:
    """The full value of `tensor` on every rank, in memory of its own; a collective for a DTensor.

    An offloaded shard travels through its mesh's device, where the result stays.
    """
    tensor = tensor.detach()
    if inner := inner_tensors(tensor):
        return rebuild(tensor, {name: gather(part) for name, part in inner.items()}, tensor.shape)
    if not isinstance(tensor, DTensor):
        return tensor.clone()
    mesh = Mesh.of(tensor)
    if _is_cut(tensor):
        freight = Gathered("", Layout.of(tensor), tensor.dtype, local_part(tensor))
        return next(_collect([freight], mesh, everywhere=True, device=mesh.device))
    return _gather_other(tensor, mesh)


def _gather_other(tensor: DTensor, mesh: Mesh) -> Tensor:
    """The full value of a tensor that is whole, or that its user has cut: the sum of all ranks' bytes.

    `full_tensor()` would call a collective that gloo names ALLGATHER_COALESCED; two threads of gloo (torch
    2.13) may free such a long name at the same time, which ends the process.
    """
    summed = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    near: Any = tensor.to(mesh.device_type)
    local = local_part(near.redistribute(placements=summed))
    if all(placement.is_replicate() for placement in summed):
        return local.clone(memory_format=torch.contiguous_format)
    full = torch.zeros(tensor.shape, dtype=tensor.dtype, device=local.device)
    full[_places(tensor.shape, tensor.device_mesh, summed)] = local
    for dim, placement in enumerate(summed):
        if not placement.is_replicate():
            dist.all_reduce(full.flatten().view(torch.uint8), group=tensor.device_mesh.get_group(dim))
    return full


def _places(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[Tensor, ...]:
    """Which elements of a tensor this rank holds: the indices in each dimension, as in `numpy.ix_`."""
    found = []
    for dim, size in enumerate(shape):
        along = [_moved(one) if getattr(one, "dim", None) == dim else Replicate() for one in placements]
        held = distribute_tensor(torch.arange(size, device=mesh.device_type), mesh, along, src_data_rank=None)
        found.append(held.to_local().view(-1, *[1] * (len(shape) - dim - 1)))
    return tuple(found)


def _moved(placement: Placement) -> Placement:
    """The same cut of the first dimension."""
    factor = getattr(placement, "split_factor", None)
    return Shard(0) if factor is None else _torch.StridedShard(0, split_factor=factor)


@torch.no_grad()
def gather_each(tensors: Iterable[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Index and full value, as `gather` gives it, of every tensor, each as soon as it is complete.

    A collective: every rank must exhaust it. The parts travel in buckets that are as large as the largest
    tensor, at least `LEAST_BYTES` and at most `BUCKET_BYTES`, in memory that is used again. It lets go of
    each part that has travelled.
    """
    cut: dict[DeviceMesh, dict[int, Gathered]] = {}
    tensor: Tensor | None = None
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, DTensor) and _is_cut(tensor) and not inner_tensors(tensor):
            freight = Gathered("", Layout.of(tensor), tensor.dtype, local_part(tensor.detach()))
            cut.setdefault(tensor.device_mesh, {})[index] = freight
        else:
            yield index, gather(tensor)
    del tensor
    for mesh, freights in cut.items():
        largest = max(one.nbytes for one in freights.values())
        device, limit = Mesh(mesh).device, min(BUCKET_BYTES, max(LEAST_BYTES, largest))
        yield from zip(
            freights, _collect(list(freights.values()), Mesh(mesh), True, device, limit), strict=True
        )


@torch.no_grad()
def full_tensors(
    tensors: Mapping[str, Tensor], *, everywhere: bool = False, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The full values of tensors, dense, in host memory of their own, each as soon as it is complete.

    Tensors that this rank already has in full come first, then the rest, in order.

    If any is a DTensor, this uses collectives: every rank must exhaust it, with the same names in the same
    order, under `Agreement.collectively`.

    Args:
        tensors: whole ones, shards, and those with a codec, by name.
        everywhere: every rank gets them; otherwise rank 0 does, and the others get none.
        dtype: floating-point tensors are cast to it, before they travel; None keeps their own.
    """
    keeps = everywhere or world_and_rank()[1] == 0
    cut: dict[DeviceMesh, dict[str, Gathered]] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) and _is_cut(tensor):
            freight = Gathered(name, Layout.of(tensor), _cast(tensor, dtype), local_part(tensor))
            cut.setdefault(tensor.device_mesh, {})[name] = freight
            continue
        if Layout.known(tensor) is None:  # the user has sharded it in another way
            tensor = gather(tensor)
        if keeps:
            yield name, _copy(dense(local_part(tensor)), dtype)
    for mesh, freights in cut.items():
        yield from zip(freights, _collect(list(freights.values()), Mesh(mesh), everywhere), strict=keeps)


@dataclass
class Gathered(Freight):
    """One tensor in parts, on its way to the ranks that want all of it."""

    part: Tensor
    """What this rank holds; it may have a codec."""
    full: Tensor = field(init=False)
    """Where all of it goes."""


def _collect(
    freights: Sequence[Gathered],
    mesh: Mesh,
    everywhere: bool,
    device: torch.device = _CPU,
    limit: int | None = None,
) -> Iterator[Tensor]:
    """Bring together tensors that are cut over a mesh; a collective.

    The full tensors come in their order, on `device`, each once it is complete: on every rank, or on rank 0
    alone. Their parts are let go then.

    Args:
        limit: most bytes of a bucket; None takes `BUCKET_BYTES`.
    """
    limit = BUCKET_BYTES if limit is None else limit
    root = None if everywhere else 0
    if root is not None and root not in mesh.replica(mesh.rank):
        return
    keeps = root in (None, mesh.rank)
    slices = list(slices_of(freights, mesh.here, limit))
    left = Counter(id(one.cargo) for one in slices)
    waiting, dispatch = deque(freights), _Dispatch(mesh, root, device)
    for bucket in [[], *in_buckets(slices, lambda one: one.nbytes, limit)]:
        if bucket:
            dispatch.carry(bucket)
        left.subtract(id(one.cargo) for one in bucket)
        while waiting and not left[id(waiting[0])]:
            done = waiting.popleft()
            if keeps:
                yield done.full if prod(done.layout.shape) else dispatch.room(done)
                vars(done).pop("full", None)  # the caller alone keeps it from here on
            vars(done).pop("part")


@dataclass
class _Dispatch:
    """Carries one bucket after the other, in the same memory."""

    mesh: Mesh
    root: int | None
    device: torch.device

    def __post_init__(self) -> None:
        self._places = [self.mesh.at(rank) for rank in self.mesh.replica(self.mesh.rank)]
        self._memory: dict[int, Tensor] = {}
        self._open: tuple[Gathered, Tensor] | None = None

    def carry(self, bucket: Sequence[Slice[Gathered]]) -> None:
        """Bring the slices from all ranks of a replica to where they are kept."""
        offsets, end = [], 0
        for one in bucket:
            offsets.append(end)
            nbytes = (one.stop - one.start) * one.cargo.dtype.itemsize
            end += -(-nbytes // _ALIGNED) * _ALIGNED
        message = self._take(-1, end)
        for one, offset in zip(bucket, offsets, strict=True):
            mine = elements(self._dense(one.cargo), *self._range(one, self.mesh.here))
            _values(message, offset, mine.numel(), one.cargo.dtype).copy_(mine)
        arrived = self._join(message)
        if arrived is None:
            return
        messages = arrived.to(self.device).split(end)
        for one, offset in zip(bucket, offsets, strict=True):
            if one.start == 0:
                one.cargo.full = self.room(one.cargo)
            for at, theirs in zip(self._places, messages, strict=True):
                start, stop = self._range(one, at)
                values = _values(theirs, offset, stop - start, one.cargo.dtype)
                one.cargo.layout.part(at).put(one.cargo.full, values, start)

    def _dense(self, freight: Gathered) -> Tensor:
        """This rank's part as a plain tensor; kept from one slice to the next."""
        if self._open is None or self._open[0] is not freight:
            self._open = freight, dense(freight.part)
        return self._open[1]

    def _range(self, one: Slice[Gathered], at: Coordinate) -> tuple[int, int]:
        """The elements of the part at a coordinate that are in a slice."""
        numel = one.cargo.layout.part(at).numel
        return min(one.start, numel), min(one.stop, numel)

    def _join(self, message: Tensor) -> Tensor | None:
        """The messages of all ranks of a replica, by rank; None on ranks that only send.

        The innermost mesh dimension is gathered first; the outer ones then gather its results.
        """
        mesh, replicas = self.mesh.device_mesh, self.mesh.dims.get("dp_replicate")
        here = list(mesh.get_coordinate() or ())
        there = here if self.root is None else (mesh.mesh == self.root).nonzero()[0].tolist()
        for dim in reversed(range(mesh.ndim)):
            if mesh.size(dim) == 1 or dim == replicas:
                continue
            if here[dim + 1 :] != there[dim + 1 :]:
                return None
            keeps = here[dim] == there[dim]
            joined = self._take(dim, message.numel() * mesh.size(dim)) if keeps else None
            if self.root is None:
                assert joined is not None
                _torch.all_gather_single(joined, message, group=mesh.get_group(dim))
            else:
                line = mesh.mesh.movedim(dim, -1)[tuple(here[:dim] + here[dim + 1 :])].tolist()
                _send_to(line[there[dim]], line, message, joined)
            if joined is None:
                return None
            message = joined
        return message

    def _take(self, key: int, nbytes: int) -> Tensor:
        """Memory for a message; what was in it before is gone."""
        if key not in self._memory or self._memory[key].numel() < nbytes:
            self._memory[key] = torch.empty(nbytes, dtype=torch.uint8, device=self.mesh.device)
        return self._memory[key][:nbytes]

    def room(self, freight: Gathered) -> Tensor:
        """Memory for a full tensor."""
        return torch.empty(freight.layout.shape, dtype=freight.dtype, device=self.device)


def _is_cut(tensor: DTensor) -> bool:
    """Whether this library has cut a tensor, and among several ranks, so that parts have to be gathered."""
    layout = Layout.known(tensor) if tensor.device_mesh.size() > 1 else None
    return layout is not None and layout.cut


def _copy(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A copy in host memory; subclasses make their own."""
    if type(value) not in (Tensor, torch.nn.Parameter):
        return value.detach().to(_CPU, _cast(value, dtype), copy=True)
    return torch.empty(value.shape, dtype=_cast(value, dtype), device=_CPU).copy_(value)


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _send_to(root: int, ranks: Sequence[int], message: Tensor, joined: Tensor | None) -> None:
    """Gather without the second copy that gloo's own gather makes; `joined` is None except on the root."""
    if joined is None:
        transfers = [dist.P2POp(dist.isend, message, root)]
    else:
        places = dict(zip(ranks, joined.chunk(len(ranks)), strict=True))
        places.pop(root).copy_(message)
        transfers = [dist.P2POp(dist.irecv, place, rank) for rank, place in places.items()]
    for work in dist.batch_isend_irecv(transfers):
        work.wait()


def _values(message: Tensor, offset: int, count: int, dtype: torch.dtype) -> Tensor:
    """Elements in a message, as a view."""
    return message[offset : offset + count * dtype.itemsize].view(dtype)
