"""Pretrained weights into a model that has been prepared already."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Set

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from composer_dist.checkpoint.state import LoadResult
from composer_dist.distributed.agreement import Agreement
from composer_dist.distributed.aliases import Structure, read_structure
from composer_dist.distributed.config import ParallelismConfig
from composer_dist.distributed.initialize import find_components
from composer_dist.distributed.layout import Layout
from composer_dist.distributed.mesh import mesh_of
from composer_dist.distributed.names import mark_unusable, reshard
from composer_dist.distributed.pretrained import Pretrained, Target
from composer_dist.distributed.pretrained_codecs import fill_encoded
from composer_dist.distributed.process_group import device_of_group
from composer_dist.distributed.steps import meta_init, storage_of
from composer_dist.distributed.sync import Cargo, deliver, device_of
from composer_dist.errors import ParallelismValueError


def load_pretrained(
    model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True, verify: bool = True
) -> LoadResult:
    """Fill a model, prepared or not, from safetensors files or a checkpoint; every rank reads what it holds.

    All ranks of the model's mesh call it. Shards and optimizers that hold them stay the same objects.
    Nothing is written where anything is refused.

    Args:
        model: sharded or not, on the meta device or not.
        path: a safetensors file; a directory as transformers, peft and `export_pretrained` write it; or what
            `save_checkpoint` or `torch.save` writes. An adapter's goes into the adapter that the model has.
            Tied tensors may have any of their names, transformers' older names are understood, and so are
            those from before peft, DDP, `torch.compile` or a `ComposerModel` were put around the model.
        strict: missing or unexpected names are an error; otherwise what is missing is initialised if it
            is on the meta device, and keeps its value if not.
        verify: compare the model's bytes in a checkpoint of `save_checkpoint` with their checksums first;
            every rank does a share. Other files have none.

    Raises:
        CheckpointKeyError: `strict`, and names are missing or unexpected: all of them are listed.
        CheckpointValueError: shapes or dtypes do not fit, or the files are corrupt.
        CheckpointRuntimeError: a file cannot be read; once reading has begun, the model is unusable.
    """
    reshard(model)
    structure = read_structure(model)
    mesh = mesh_of(model) or _mesh_of(structure)
    agreement = Agreement(mesh.mesh.flatten().tolist() if mesh is not None else None)
    pretrained = Pretrained.open(path, structure, agreement, strict, verify)
    if pretrained is None:
        raise ParallelismValueError(
            "The ranks hold models of different structure: names, shapes, dtypes, frozen parameters or ties."
        )
    with agreement.together("the initialisers"):
        lacking = {
            name
            for name, held in structure.tensors.items()
            if held.get().is_meta and name not in pretrained.names
        }
        if lacking:
            find_components(structure, lacking)
    fill_model(model, structure, pretrained, lacking)
    return LoadResult(pretrained.match.missing, pretrained.match.unexpected)


def fill_model(
    model: nn.Module, structure: Structure, pretrained: Pretrained, lacking: Set[str] = frozenset()
) -> None:
    """Read what a matched checkpoint has for a model into it; all ranks of its mesh call it.

    Args:
        lacking: names of tensors on the meta device that the checkpoint has not, to be initialised.

    Raises:
        CheckpointRuntimeError: a file cannot be read; the model is unusable from then on.
    """
    agreement, mesh = pretrained.agreement, mesh_of(model) or _mesh_of(structure)
    device = device_of_group() if mesh is None else device_of(mesh)
    try:
        limit, tensors = ParallelismConfig().bucket_bytes, structure.tensors
        names = sorted(name for name in pretrained.names if not tensors[name].info.inner)
        targets = [_target(name, model, structure, mesh, device) for name in names]
        pretrained.fill(targets, limit)
        others = {}
        for name in sorted(pretrained.names.difference(names)):
            storage_of(model, tensors[name], device)
            others[name] = tensors[name].get()
        fill_encoded(
            pretrained, others, device, agreement, lambda cargoes: _send(cargoes, mesh, agreement, limit)
        )
        for target in targets:
            _put_back(structure.tensors[target.name].get(), target.local)
        if lacking:
            with agreement.together("initialisation"), torch.device(device):
                meta_init(model)
    except BaseException as error:
        mark_unusable(model, str(error) or type(error).__name__)
        raise


def _mesh_of(structure: Structure) -> DeviceMesh | None:
    """The largest mesh that anything in the model is sharded over; without any, all ranks hold it alike."""
    tensors = [held.get() for held in structure.tensors.values()]
    meshes = [tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)]
    if not meshes and dist.is_initialized() and dist.get_world_size() > 1:
        size = (dist.get_world_size(),)
        return init_device_mesh(device_of_group().type, size, mesh_dim_names=("dp_replicate",))
    return max(meshes, key=lambda mesh: mesh.size(), default=None)


def _target(
    name: str, model: nn.Module, structure: Structure, mesh: DeviceMesh | None, device: torch.device
) -> Target:
    """Where a tensor's values go: its own memory, if that is contiguous."""
    held = structure.tensors[name]
    local = _local(held.get())
    if local.is_meta:
        local = storage_of(model, held, device)
    elif not local.is_contiguous():
        local = torch.empty_like(local, memory_format=torch.contiguous_format)
    now = held.get()
    if isinstance(now, DTensor):
        return Target(name, Layout.of(now), local, now.device_mesh)
    return Target(name, Layout(held.info.shape), local, mesh)


def _send(
    cargoes: Mapping[int, Sequence[Cargo]], mesh: DeviceMesh | None, agreement: Agreement, limit: int
) -> None:
    """Deliver over the mesh, or, where this rank is alone, copy."""
    if mesh is not None:
        agreement.collectively("the delivery", lambda: deliver(cargoes, mesh, limit))
        return
    for cargo in (cargo for mine in cargoes.values() for cargo in mine):
        assert cargo.source is not None
        cargo.target.copy_(cargo.source)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


@torch.no_grad()
def _put_back(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copy what could not be read in place."""
    if not (local := _local(tensor)).is_contiguous():
        local.copy_(values)
