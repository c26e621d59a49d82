"""Full tensors into a model's own, sharded or not: `collect` the other way round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from composer_dist.distributed.mesh.layout import Coordinate, Layout
from composer_dist.distributed.moving import whole
from composer_dist.distributed.moving.messages import Cargo, in_buckets
from composer_dist.distributed.moving.transfer import take_part
from composer_dist.distributed.moving.way import Transport
from composer_dist.distributed.moving.whole import gather
from composer_dist.distributed.prepared import mesh_of_world
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
    if isinstance(target, DTensor):
        mesh = target.device_mesh
        full = full.detach().to(mesh.device_type)
        if (layout := Layout.of(target)).tp_dim is not None:
            part = layout.part(Coordinate.of(mesh)).of(full)
            target.to_local().copy_(part.view(target.to_local().shape))
            return
        # src_data_rank=None slices what is here; the default would scatter rank 0's.
        shard = distribute_tensor(full, mesh, target.placements, src_data_rank=None)
        target.to_local().copy_(shard.to_local())
    else:
        target.copy_(full)


def copy_into(target: Tensor, value: Tensor) -> None:
    """Write a value into `target`, however either is sharded; a collective where they are so differently."""
    if not isinstance(value, DTensor):
        scatter_into(target, value)
    elif isinstance(target, DTensor) and _place(target) == _place(value):
        target.to_local().copy_(value.to_local())
    else:
        scatter_into(target, gather(value))


def _place(tensor: DTensor) -> tuple[Any, ...]:
    return tensor.device_mesh, tensor.placements


def broadcast_full(full: Tensor | None, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Rank 0's `full` on every rank, on the device of the default group."""
    device = device_of_group()
    if world_and_rank()[1] != 0 or full is None:
        full = torch.empty(shape, dtype=dtype, device=device)
    full = full.detach().to(device).contiguous()
    if dist.is_initialized():
        dist.broadcast(full, src=0)
    return full


@torch.no_grad()
def fill(
    model: nn.Module,
    targets: Mapping[str, Tensor],
    full: Mapping[str, Tensor],
    *,
    everywhere: bool = False,
    by_part: bool = False,
) -> None:
    """Write full values into tensors in place, in the tensors' own dtypes; a collective.

    Args:
        model: whose mesh the values travel over.
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
    agreement, mesh = Agreement(), mesh_of_world(model)
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
            with Transport(mesh.device_mesh, agreement, whole.BUCKET_BYTES) as transport:
                transport.send({0: [cargo for cargo, _ in freights]})
        with agreement.together("encoding a state"):
            for cargo, home in freights:
                if home is not None:
                    encode_into(home, cargo.target)
    odd = {name: target for name, target in targets.items() if name not in usual}
    if odd:
        agreement.collectively("the delivery", lambda: _one_by_one(odd, source, not alone))


def _copied_bytes(target: Tensor, by_part: bool) -> int:
    """Bytes of the copies that encoding a tensor takes, if it takes any."""
    return target.numel() * 4 if by_part else sum(inner.nbytes for inner in describe_inner(target))


def _freights(
    name: str, target: Tensor, source: Tensor | None, by_part: bool
) -> Iterator[tuple[Cargo, Tensor | None]]:
    """The cargoes that fill a tensor; with each, the tensor that has to be made of it, if any."""
    if source is not None and (by_part or codec_of(target) is None):
        source = dense(source)
    if by_part:
        yield _freight(name, target, source, torch.float32 if target.is_floating_point() else target.dtype)
        return
    value = encoded(source, target) if source is not None else None
    for part, inner, full in parts(name, target, value):
        yield _freight(part, inner, full, inner.dtype)


def _freight(
    name: str, target: Tensor, source: Tensor | None, dtype: torch.dtype
) -> tuple[Cargo, Tensor | None]:
    local = local_part(target).detach()
    direct = codec_of(local) is None and local.dtype == dtype and local.is_contiguous()
    place = local if direct else torch.empty(local.shape, dtype=dtype, device=local.device)
    return Cargo(name, Layout.of(target), dtype, place, source), None if direct else local


def _one_by_one(targets: Mapping[str, Tensor], full: Mapping[str, Tensor], broadcasts: bool) -> None:
    """What is cut in ways of its user's own: every rank gets the whole of it, and takes its part."""
    for name, target in targets.items():
        value = encoded(full[name], target) if name in full else None
        for _, part, inner in parts(name, target, value):
            sent = broadcast_full(inner, part.shape, part.dtype) if broadcasts else inner
            scatter_into(part, sent)
