"""Full tensors into a model's own, sharded or not: `collect` the other way round."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from composer_dist.distributed import collect
from composer_dist.distributed.agreement import Agreement
from composer_dist.distributed.codecs import (
    codec_of,
    dense,
    describe_inner,
    encode_into,
    encoded,
    local_part,
    parts,
)
from composer_dist.distributed.layout import Coordinate, Layout
from composer_dist.distributed.mesh import mesh_of
from composer_dist.distributed.process_group import device_of_group, world_and_rank
from composer_dist.distributed.summon import broadcast_full, scatter_into
from composer_dist.distributed.sync import Cargo, take_part
from composer_dist.distributed.transport import Transport


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
    agreement, mesh = Agreement(), _mesh_of_world(model, targets.values())
    world, rank = world_and_rank()
    source = full if everywhere or rank == 0 else {}
    alone = everywhere or world == 1
    usual = {n: t for n, t in targets.items() if (mesh or alone) and Layout.known(t) is not None}
    for batch in _batches(usual, by_part):
        with agreement.together("encoding a state"):
            freights = [f for n in batch for f in _freights(n, targets[n], source.get(n), by_part)]
            if alone:
                here = Coordinate() if mesh is None else Coordinate.of(mesh)
                for cargo, _ in freights:
                    take_part(cargo, here)
        if not alone:
            assert mesh is not None
            with Transport(mesh, agreement, collect.BUCKET_BYTES) as transport:
                transport.send({0: [cargo for cargo, _ in freights]})
        with agreement.together("encoding a state"):
            for cargo, home in freights:
                if home is not None:
                    encode_into(home, cargo.target)
    odd = {name: target for name, target in targets.items() if name not in usual}
    if odd:
        agreement.collectively("the delivery", lambda: _one_by_one(odd, source, not alone))


def _mesh_of_world(model: nn.Module, tensors: Iterable[Tensor]) -> DeviceMesh | None:
    """The mesh of all ranks that the tensors are sharded over, or would be; None if there is none."""
    world, _ = world_and_rank()
    meshes = [tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)]
    known = mesh_of(model)
    for mesh in [known, *meshes] if known is not None else meshes:
        if mesh.size() == world:
            return mesh
    if meshes or not dist.is_initialized():
        return None
    return init_device_mesh(device_of_group().type, (world,), mesh_dim_names=("dp_replicate",))


def _batches(targets: Mapping[str, Tensor], by_part: bool) -> Iterator[list[str]]:
    """Names of tensors whose copies, where encoding needs any, are one bucket's bytes together."""
    batch: list[str] = []
    size = 0
    for name, target in targets.items():
        cost = target.numel() * 4 if by_part else sum(inner.nbytes for inner in describe_inner(target))
        if batch and size + cost > collect.BUCKET_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(name)
        size += cost
    if batch:
        yield batch


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
