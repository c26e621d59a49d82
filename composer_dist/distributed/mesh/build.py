"""Building the mesh that a configuration asks for, on all ranks or on none."""

import os
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composer_dist.config.mesh import MeshConfig
from composer_dist.distributed.mesh.dimensions import DIMENSIONS, mesh_dim_names
from composer_dist.distributed.mesh.mesh import Mesh
from composer_dist.distributed.ranks import process_group
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.errors import ParallelismRuntimeError, ParallelismValueError


def build_mesh(config: MeshConfig, world_size: int | None = None) -> DeviceMesh:
    """The mesh over all ranks that `config` describes, on the process group's own device.

    Raises:
        ParallelismRuntimeError: used before the process group is initialized.
        ParallelismValueError: the sizes do not multiply to the world size.
    """
    if not dist.is_initialized():
        raise ParallelismRuntimeError("A mesh needs a process group; call process_group.init() first.")
    sizes = config.resolve(dist.get_world_size() if world_size is None else world_size)
    names = mesh_dim_names(sizes)
    device_type = process_group.device_here(config.device_type or process_group.device_of_group()).type
    mesh = init_device_mesh(device_type, tuple(sizes[n] for n in names), mesh_dim_names=names)
    Mesh(mesh).make_groups()
    return mesh


def mesh_for(wanted: MeshConfig | DeviceMesh) -> Mesh:
    """The requested mesh: the user's own, or one built from sizes.

    A 2-D mesh without names is rebuilt over the same groups with names, because FSDP2 requires names.
    """
    if isinstance(wanted, MeshConfig):
        return Mesh(build_mesh(wanted))
    if wanted.ndim == 2 and wanted.mesh_dim_names is None:
        groups = [wanted.get_group(dim) for dim in range(2)]
        names = DIMENSIONS[:2]
        wanted = DeviceMesh.from_group(groups, wanted.device_type, wanted.mesh, mesh_dim_names=names)
    mesh = Mesh.known(wanted)
    mesh.make_groups()
    return mesh


def mesh_sizes(wanted: MeshConfig | DeviceMesh, world_size: int) -> dict[str, int]:
    """Each of `DIMENSIONS` to its size: from the user's own mesh if there is one."""
    return wanted.resolve(world_size) if isinstance(wanted, MeshConfig) else Mesh(wanted).sizes


class Asks(Protocol):
    """A request that includes a mesh."""

    @property
    def mesh(self) -> MeshConfig | DeviceMesh:
        """The sizes of the mesh, or a mesh of the caller's own."""


R = TypeVar("R", bound=Asks)


def meet(ask: Callable[[], R]) -> tuple[R, Mesh, Agreement]:
    """Build the mesh once all ranks are known to ask for the same one, because building it communicates.

    Args:
        ask: returns this rank's request, or raises; then every rank does.

    Returns:
        The request, its mesh, and the agreement among the ranks of the mesh.
    """
    error, asked, request, wanted, ranks = None, "", None, None, None
    try:
        request = ask()
        wanted = request.mesh
        world, _ = process_group.world_and_rank()
        asked = f"{mesh_sizes(wanted, world)} on {wanted.device_type or 'the default device'}"
        if isinstance(wanted, DeviceMesh):
            asked += f", a mesh of {wanted.mesh.tolist()} with the dimensions {wanted.mesh_dim_names}"
    except Exception as caught:
        error = caught
    if isinstance(wanted, DeviceMesh):
        ranks = wanted.mesh.flatten().tolist()
        if wanted.get_coordinate() is None:
            raise ParallelismValueError(f"This rank is not part of the mesh {wanted.mesh.tolist()}.")
    agreement = Agreement(ranks)

    def compare(findings: list[list[Any]]) -> bool:
        """Whether all ranks have the mesh from before, which one that was interrupted may lack."""
        other = next((i for i, finding in enumerate(findings) if finding[:2] != findings[0][:2]), None)
        if other is None:
            return all(known for *_, known in findings)
        ranks = agreement.ranks[0], agreement.ranks[other]
        meshes, versions, _ = zip(findings[0], findings[other], strict=True)
        if versions[0] != versions[1]:
            raise ParallelismValueError(
                f"The ranks run different versions of torch: rank {ranks[0]} {versions[0]}, rank {ranks[1]} "
                f"{versions[1]}. Install the same one everywhere."
            )
        raise ParallelismValueError(
            f"The ranks ask for different meshes: rank {ranks[0]} for {meshes[0]}, rank {ranks[1]} for "
            f"{meshes[1]}. Give every rank the same configuration."
        )

    known = _made.get(asked, (None,))[0] is dist.group.WORLD
    reuse = agreement.reach("the mesh", [asked, torch.__version__, known], compare, error=error)
    assert request is not None
    if isinstance(request.mesh, DeviceMesh):
        return request, mesh_for(request.mesh), agreement
    if not reuse:
        _made[asked] = dist.group.WORLD, Mesh(build_mesh(request.mesh))
    return request, _made[asked][1], agreement


_made: dict[str, tuple[Any, Mesh]] = {}
"""What ranks asked for, to the world's group and the mesh: models share it, as each group has threads."""
_inherited: list[object] = []
process_group.at_destroy.append(_made.clear)


def _keep_inherited() -> None:
    """In a forked process: gloo waits for threads when a group is freed, and they are not there."""
    _inherited.append(_made.copy())
    _made.clear()


os.register_at_fork(after_in_child=_keep_inherited)
