"""Wholes to parts: full values are written into tensors, sharded or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from composer_dist.distributed.mesh.layout import Coordinate, Layout
from composer_dist.distributed.mesh.mesh import Mesh
from composer_dist.distributed.moving import whole
from composer_dist.distributed.moving.messages import Cargo, in_buckets
from composer_dist.distributed.moving.transfer import take_part
from composer_dist.distributed.moving.way import Transport
from composer_dist.distributed.moving.whole import gather
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.distributed.ranks.process_group import device_of_group, world_and_rank
from composer_dist.tensors.inner import (
    codec_of,
    dense,
    describe_inner,
    encode_into,
    encoded,
    local_part,
    parts,
)


@torch.no_grad()
def scatter_into(target: Tensor, full: Tensor | None) -> None:
    """Write this rank's part of `full` into `target`, in the target's dtype; no communication.

    Args:
        target: a plain tensor or a DTensor of any placement, changed in place.
        full: the full value, on any device; None writes nothing.
    """
    if full is None:
        return
    if not isinstance(target, DTensor):
        target.copy_(full)
        return
    mesh, local, layout = target.device_mesh, target.to_local(), Layout.of(target)
    full = full.detach().to(mesh.device_type)
    if layout.tp_dim is not None:
        local.copy_(layout.part(Mesh.of(target).here).of(full).view(local.shape))
    else:  # src_data_rank=None slices what is here; the default would scatter rank 0's
        local.copy_(distribute_tensor(full, mesh, target.placements, src_data_rank=None).to_local())


def copy_into(target: Tensor, value: Tensor) -> None:
    """Write a value into `target`, however either is sharded; a collective if their placements differ."""
    if not isinstance(value, DTensor):
        scatter_into(target, value)
    elif isinstance(target, DTensor) and (target.device_mesh, target.placements) == (
        value.device_mesh,
        value.placements,
    ):
        target.to_local().copy_(value.to_local())
    else:
        scatter_into(target, gather(value))


def write_full(target: Tensor, full: Tensor | None, from_rank0: bool) -> None:
    """Write a full value into a tensor, or into each of the tensors that it is made of.

    Args:
        full: of the target's class; None writes nothing, unless the value comes from rank 0.
        from_rank0: every rank takes rank 0's value; a collective.
    """
    for _, part, value in parts("", target, full):
        if from_rank0:
            value = _broadcast(value, part.shape, part.dtype)
        scatter_into(part, value)


def _broadcast(full: Tensor | None, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Rank 0's `full` on every rank, on the device of the default group."""
    device = device_of_group()
    if world_and_rank()[1] != 0 or full is None:
        full = torch.empty(shape, dtype=dtype, device=device)
    full = full.detach().to(device).contiguous()
    if dist.is_initialized():
        dist.broadcast(full, src=0)
    return full


@dataclass(frozen=True)
class Landing:
    """Where values for this rank's part of a tensor arrive: in its own memory if possible."""

    memory: Tensor
    """Contiguous, plain, of the part's elements in row-major order."""
    home: Tensor | None
    """The part, if it is not the memory itself; `settle` then gives it the value."""

    @classmethod
    def of(cls, tensor: Tensor, dtype: torch.dtype) -> Landing:
        """For values of a dtype."""
        local = local_part(tensor).detach()
        if codec_of(local) is None and local.dtype == dtype and local.is_contiguous():
            return cls(local, None)
        return cls(torch.empty(local.shape, dtype=dtype, device=local.device), local)

    def settle(self) -> None:
        """Encode or copy what has arrived, if it has not arrived in place."""
        if self.home is not None:
            encode_into(self.home, self.memory)


@torch.no_grad()
def fill(
    mesh: Mesh | None,
    targets: Mapping[str, Tensor],
    full: Mapping[str, Tensor],
    *,
    everywhere: bool = False,
    by_part: bool = False,
) -> None:
    """Write full values into tensors in place, in the tensors' own dtypes; a collective.

    Args:
        mesh: of all ranks, over which the values travel; None if there is none.
        targets: real tensors by name: the same names in the same order on every rank.
        full: their full values, of the same shapes, on rank 0; not read on the others.
        everywhere: every rank has them; then nothing travels.
        by_part: each rank encodes its own part of what has a codec, as its optimizer does; otherwise
            rank 0 encodes the whole.

    Raises:
        ParallelismError: a codec failed, or a rank was lost.
    """
    if not targets:
        return
    agreement = Agreement()
    world, rank = world_and_rank()
    if mesh is not None and mesh.size != world:
        mesh = None
    source = full if everywhere or rank == 0 else {}
    alone = everywhere or world == 1
    usual = {n: t for n, t in targets.items() if (mesh or alone) and Layout.known(t) is not None}
    for batch in in_buckets(usual, lambda name: _copied_bytes(targets[name], by_part), whole.BUCKET_BYTES):
        with agreement.together("encoding a state"):
            freights = [f for n in batch for f in _freights(n, targets[n], source.get(n), by_part)]
            if alone:
                here = Coordinate() if mesh is None else mesh.here
                for cargo, _ in freights:
                    take_part(cargo, here)
        if not alone:
            assert mesh is not None
            with Transport(mesh, agreement, whole.BUCKET_BYTES) as transport:
                transport.send({0: [cargo for cargo, _ in freights]})
        with agreement.together("encoding a state"):
            for _, landing in freights:
                landing.settle()
    odd = {name: target for name, target in targets.items() if name not in usual}
    if odd:
        agreement.collectively("the delivery", lambda: _one_by_one(odd, source, not alone))


def _copied_bytes(target: Tensor, by_part: bool) -> int:
    """Bytes of the copies that encoding a tensor takes, if it takes any."""
    return target.numel() * 4 if by_part else sum(inner.nbytes for inner in describe_inner(target))


def _freights(
    name: str, target: Tensor, source: Tensor | None, by_part: bool
) -> Iterator[tuple[Cargo, Landing]]:
    """The cargoes that fill a tensor, and where they arrive."""
    if source is not None and (by_part or codec_of(target) is None):
        source = dense(source)
    if by_part:
        dtype = torch.float32 if target.is_floating_point() else target.dtype
        inner = [(name, target, source, dtype)]
    else:
        value = encoded(source, target) if source is not None else None
        inner = [(path, part, full, part.dtype) for path, part, full in parts(name, target, value)]
    for path, part, full, dtype in inner:
        landing = Landing.of(part, dtype)
        yield Cargo(path, Layout.of(part), dtype, landing.memory, full), landing


def _one_by_one(targets: Mapping[str, Tensor], full: Mapping[str, Tensor], broadcasts: bool) -> None:
    """Fill tensors that the user has cut in other ways: each rank takes its part of the full value."""
    for name, target in targets.items():
        write_full(target, encoded(full[name], target) if name in full else None, broadcasts)
