"""Whole to parts: writes full values into tensors, sharded or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from composer_dist.distributed.mesh.layout import Coordinate, Layout
from composer_dist.distributed.mesh.mesh import Mesh
from composer_dist.distributed.moving import gather as gathering
from composer_dist.distributed.moving.deliver import take_part
from composer_dist.distributed.moving.gather import gather
from composer_dist.distributed.moving.messages import Cargo, in_buckets
from composer_dist.distributed.moving.transport import Transport
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
def scatter_into(target: Tensor, full: Tensor) -> None:
    """Write this rank's part of `full` into `target`, in the target's dtype; no communication."""
    if not isinstance(target, DTensor):
        target.copy_(full)
    elif Layout.known(target) is not None and (local := target.to_local()).is_contiguous():
        take_part(Cargo("", Layout.of(target), local.dtype, local, full.detach()), Mesh.of(target).here)
    else:  # src_data_rank=None slices what is here; the default would scatter rank 0's
        mesh, near = target.device_mesh, full.detach().to(target.device_mesh.device_type)
        target.to_local().copy_(
            distribute_tensor(near, mesh, target.placements, src_data_rank=None).to_local()
        )


def copy_into(target: Tensor, value: Tensor) -> None:
    """Write a value into `target`, each sharded or not; a collective if their placements differ."""
    if not isinstance(value, DTensor):
        scatter_into(target, value)
    elif isinstance(target, DTensor) and (target.device_mesh, target.placements) == (
        value.device_mesh,
        value.placements,
    ):
        target.to_local().copy_(value.to_local())
    else:
        scatter_into(target, gather(value))


def write_full(target: Tensor, full: Tensor | None, from_rank0: bool = False) -> None:
    """Write a full value into a tensor, or into each of its inner tensors.

    Args:
        full: of the target's class; with `from_rank0`, None on the other ranks.
        from_rank0: every rank takes rank 0's value; a collective.
    """
    for _, part, value in parts("", target, full):
        if from_rank0:
            device = device_of_group()
            if world_and_rank()[1] != 0 or value is None:
                value = torch.empty(part.shape, dtype=part.dtype, device=device)
            value = value.detach().to(device).contiguous()
            if dist.is_initialized():
                dist.broadcast(value, src=0)
        if value is not None:
            scatter_into(part, value)


@dataclass(frozen=True)
class Landing:
    """Memory in which values for this rank's part of a tensor arrive: the part's own, if possible."""

    memory: Tensor
    """Contiguous, plain, with the part's elements in row-major order."""
    home: Tensor | None
    """The part, if the values arrive elsewhere; `settle` then writes them into it."""

    @classmethod
    def of(cls, tensor: Tensor, dtype: torch.dtype) -> Landing:
        """The landing for values of `dtype`."""
        local = local_part(tensor).detach()
        if codec_of(local) is None and local.dtype == dtype and local.is_contiguous():
            return cls(local, None)
        return cls(torch.empty(local.shape, dtype=dtype, device=local.device), local)

    def settle(self) -> None:
        """Encode or copy the values, if they did not arrive in place."""
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
        mesh: of all ranks, over which values are sent; None if there is none.
        targets: real tensors by name, with the same names in the same order on every rank.
        full: their full values, of the same shapes, on rank 0; not read on the others.
        everywhere: every rank has them; then nothing is sent.
        by_part: each rank encodes its own part of a tensor with a codec, as its optimizer does; otherwise
            rank 0 encodes the whole tensor.
    """
    if not targets:
        return
    agreement = Agreement()
    world, rank = world_and_rank()
    if mesh is not None and mesh.size != world:
        mesh = None
    source = full if everywhere or rank == 0 else {}
    alone = everywhere or world == 1
    usual = {n: t for n, t in targets.items() if (mesh or alone) and _is_cut_over(mesh, t)}

    def copied_bytes(name: str) -> int:  # by encoding a tensor
        now = targets[name]
        return now.numel() * 4 if by_part else sum(inner.nbytes for inner in describe_inner(now))

    for batch in in_buckets(usual, copied_bytes, gathering.BUCKET_BYTES):
        with agreement.together("encoding a state"):
            freights = [f for n in batch for f in _freights(n, targets[n], source.get(n), by_part)]
            if alone:
                here = Coordinate() if mesh is None else mesh.here
                for cargo, _ in freights:
                    take_part(cargo, here)
        if not alone:
            assert mesh is not None
            with Transport(mesh, agreement, gathering.BUCKET_BYTES) as transport:
                transport.send({0: [cargo for cargo, _ in freights]})
        with agreement.together("encoding a state"):
            for _, landing in freights:
                landing.settle()

    def write_others() -> None:  # cut by the user in other ways, or over another mesh
        for name in (name for name in targets if name not in usual):
            value = encoded(source[name], targets[name]) if name in source else None
            write_full(targets[name], value, not alone)

    if len(usual) < len(targets):
        agreement.collectively("the delivery", write_others)


def _is_cut_over(mesh: Mesh | None, tensor: Tensor) -> bool:
    """Whether it is cut as this library does, over as many ranks as `mesh` has; the same on all ranks.

    A module may contain models that were prepared for different meshes.
    """
    layout = Layout.known(tensor)
    if layout is None or not isinstance(tensor, DTensor) or mesh is None:
        return layout is not None
    _, shards, tps = mesh.table.shape
    _, own_shards, own_tps = Mesh.of(tensor).table.shape
    return (not layout.rows or shards == own_shards) and (layout.tp_dim is None or tps == own_tps)


def _freights(
    name: str, target: Tensor, source: Tensor | None, by_part: bool
) -> Iterator[tuple[Cargo, Landing]]:
    """The cargoes that fill a tensor, each with its landing."""
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
