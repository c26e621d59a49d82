"""Building the mesh that a configuration asks for, on all ranks or on none."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composer_dist.config.mesh import MeshConfig
from composer_dist.config.parallelism import ParallelismConfig
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
        raise ParallelismRuntimeError(
            "The mesh was asked for before the process group is initialized; call "
            "composer_dist.distributed.ranks.process_group.init() first."
        )
    sizes = config.resolve(dist.get_world_size() if world_size is None else world_size)
    names = mesh_dim_names(sizes)
    device_type = config.device_type or process_group.device_of_group().type
    mesh = init_device_mesh(device_type, tuple(sizes[n] for n in names), mesh_dim_names=names)
    Mesh(mesh).make_groups()
    return mesh


def mesh_for(config: ParallelismConfig) -> Mesh:
    """The mesh that a configuration asks for: the user's own one, or one built from its sizes.

    A 2-D mesh without names is rebuilt over the same groups with names, because FSDP2 requires names.

    Raises:
        ParallelismRuntimeError: used before the process group is initialized.
        ParallelismValueError: sizes that do not multiply to the world size, or a mesh of the user's own
            that cannot be used (see `roles`).
    """
    own = own_mesh(config)
    if own is None:
        assert isinstance(config.mesh, MeshConfig)
        return Mesh(build_mesh(config.mesh))
    if own.ndim == 2 and own.mesh_dim_names is None:
        groups = [own.get_group(dim) for dim in range(2)]
        own = DeviceMesh.from_group(groups, own.device_type, own.mesh, mesh_dim_names=DIMENSIONS[:2])
    mesh = Mesh(own)
    mesh.make_groups()
    return mesh


def own_mesh(config: ParallelismConfig) -> DeviceMesh | None:
    """The mesh that the user has made, if there is one.

    Raises:
        ParallelismValueError: a mesh of the user's own beside another one, or beside sizes for one.
    """
    own = config.fsdp2.device_mesh if config.fsdp2 else None
    if isinstance(config.mesh, DeviceMesh):
        own, other = config.mesh, own
        both = other is not None and other is not own
    else:
        both = own is not None and config.mesh != MeshConfig()
    if both:
        raise ParallelismValueError(
            "Both FSDP2Config.device_mesh and ParallelismConfig.mesh say what the mesh is; give one."
        )
    return own


def mesh_sizes(config: ParallelismConfig, world_size: int) -> dict[str, int]:
    """Each of `DIMENSIONS` to its size: those of the user's own mesh where there is one.

    Raises:
        ParallelismValueError: sizes that do not multiply to `world_size`, or a mesh of the user's own
            that cannot be used.
    """
    own = own_mesh(config)
    if own is None:
        assert isinstance(config.mesh, MeshConfig)
        return config.mesh.resolve(world_size)
    mesh = Mesh(own)
    if "dp_replicate" in mesh.dims and "dp_shard" not in mesh.dims and config.ddp is None:
        raise ParallelismValueError(
            "The mesh has dp_replicate and no dp_shard, which FSDP2 cannot replicate over; add a dimension "
            "dp_shard of size 1, or replicate by DDP (ddp=DDPConfig())."
        )
    return mesh.sizes


def agree_on_mesh(
    read_config: Callable[[], ParallelismConfig],
) -> tuple[Agreement, Mesh, ParallelismConfig]:
    """Build the mesh once all ranks are known to ask for the same one, because building it communicates.

    Args:
        read_config: gives this rank's configuration, or raises; then every rank does.

    Returns:
        The agreement among the mesh's ranks, the mesh, and the configuration.

    Raises:
        ParallelismValueError: the ranks ask for different meshes, or one that does not fit the world.
    """
    settings, error, asked, own = ParallelismConfig(), None, "", None
    try:
        settings = read_config()
        world, _ = process_group.world_and_rank()
        own = own_mesh(settings)
        asked = f"{mesh_sizes(settings, world)} on {settings.mesh.device_type or 'the default device'}"
        if own is not None:
            asked += f", a mesh of {own.mesh.tolist()} with the dimensions {own.mesh_dim_names}"
    except Exception as caught:
        error = caught
    if own is not None and own.get_coordinate() is None:
        raise ParallelismValueError(f"This rank is not part of the mesh, which has {own.mesh.tolist()}.")
    agreement = Agreement(None if own is None else own.mesh.flatten().tolist())

    def compare(findings: list[str]) -> None:
        other = next((i for i, finding in enumerate(findings) if finding != findings[0]), None)
        if other is not None:
            raise ParallelismValueError(
                f"The ranks ask for different meshes: rank {agreement.ranks[0]} for {findings[0]}, rank "
                f"{agreement.ranks[other]} for {findings[other]}. Give every rank the same configuration."
            )

    agreement.reach("the mesh", asked, compare, error=error)
    return agreement, mesh_for(settings), settings
