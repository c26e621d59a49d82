"""Reads values from files into existing models and tensors, sharded or not."""

from collections.abc import Mapping, Sequence, Set

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer_dist.checkpoint.format.opened import Opened
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.distributed.mesh.layout import Layout
from composer_dist.distributed.mesh.mesh import Mesh
from composer_dist.distributed.moving.deliver import deliver
from composer_dist.distributed.moving.messages import Cargo
from composer_dist.distributed.moving.scatter import Landing
from composer_dist.distributed.prepared import mesh_of_world, usable_or_marked
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.distributed.ranks.process_group import device_of_group
from composer_dist.distributed.steps import meta_init
from composer_dist.distributed.weights.disk import Pretrained, UnfilledPart
from composer_dist.distributed.weights.fill import fill_encoded
from composer_dist.distributed.weights.storage import give_memory
from composer_dist.files.match import Match
from composer_dist.structure.structure import Structure
from composer_dist.tensors.blueprint import Blueprint
from composer_dist.tensors.inner import codec_of, local_part


def fill_model(
    model: nn.Module, structure: Structure, pretrained: Pretrained, lacking: Set[str] = frozenset()
) -> None:
    """Read a matched checkpoint into a model; all ranks of its mesh call it.

    Args:
        lacking: names of tensors on the meta device that the checkpoint lacks, to be initialized.

    Raises:
        CheckpointRuntimeError: a file cannot be read; the model is unusable from then on.
    """
    agreement, mesh = pretrained.agreement, mesh_of_world(model)
    device = device_of_group() if mesh is None else mesh.device
    with usable_or_marked(model):
        limit, tensors = ParallelismConfig().bucket_bytes, structure.tensors
        names = sorted(name for name in pretrained.names if not tensors[name].info.inner)
        encoded_names = sorted(pretrained.names.difference(names))
        on_meta = [name for name in names if local_part(tensors[name].get()).is_meta]
        give_memory(structure, [*on_meta, *encoded_names], device)
        landings = {name: Landing.of(now := tensors[name].get(), now.dtype) for name in names}
        targets = [_destination(name, tensors[name].get(), landings[name], mesh) for name in names]
        pretrained.fill(targets, limit)
        others = {name: tensors[name].get() for name in encoded_names}
        fill_encoded(
            pretrained, others, device, agreement, lambda cargoes: _send(cargoes, mesh, agreement, limit)
        )
        for landing in landings.values():
            landing.settle()
        if lacking:
            with agreement.together("initialization"), torch.device(device):
                meta_init(model)


def fill_tensors(opened: Opened, tensors: Mapping[str, Tensor], agreement: Agreement) -> None:
    """Read tensors, sharded or not, in place; all ranks call it."""
    landings, targets = [], []
    for path, tensor in tensors.items():
        dtype = tensor.dtype if codec_of(tensor) is None else torch.float32
        landings.append(Landing.of(tensor, dtype))
        targets.append(_destination(path, tensor, landings[-1], None))
    if targets:
        reader_of(opened, opened.tensors, agreement).fill(targets, ParallelismConfig().bucket_bytes)
    for landing in landings:
        landing.settle()


def reader_of(opened: Opened, blueprints: dict[str, Blueprint], agreement: Agreement) -> Pretrained:
    """A reader of slices of the tensors in `blueprints`."""
    return Pretrained(opened.index, opened.root, Match(tensors=blueprints), agreement)


def _destination(name: str, tensor: Tensor, landing: Landing, mesh: Mesh | None) -> UnfilledPart:
    over = Mesh.of(tensor) if isinstance(tensor, DTensor) else mesh
    return UnfilledPart(name, Layout.of(tensor), landing.memory, over)


def _send(
    cargoes: Mapping[int, Sequence[Cargo]], mesh: Mesh | None, agreement: Agreement, limit: int
) -> None:
    """Deliver over the mesh, or copy if there is none."""
    if mesh is not None:
        agreement.collectively("the delivery", lambda: deliver(cargoes, mesh, limit))
        return
    for cargo in (cargo for mine in cargoes.values() for cargo in mine):
        assert cargo.source is not None
        cargo.target.copy_(cargo.source)
