"""The device mesh: the one owner of its dimensions and their groups.

The dimensions are named "dp_replicate", "dp_shard", "cp" and "tp", outermost first. A dimension of
size 1 is left out, except that a replicated model keeps "dp_shard" beside "dp_replicate" (FSDP2 tells
replication from sharding by the number of dimensions).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composer_dist.distributed import process_group
from composer_dist.distributed.agreement import Agreement
from composer_dist.distributed.config import MeshConfig, ParallelismConfig
from composer_dist.errors import ParallelismRuntimeError, ParallelismValueError

_DATA_PARALLEL = ("dp_replicate", "dp_shard")


def build_mesh(config: MeshConfig, world_size: int | None = None) -> DeviceMesh:
    """The mesh over all ranks that `config` describes, on the process group's own device.

    Raises:
        ParallelismRuntimeError: used before the process group is initialized.
        ParallelismValueError: the sizes do not multiply to the world size.
    """
    if not dist.is_initialized():
        raise ParallelismRuntimeError(
            "The mesh was asked for before the process group is initialized; call "
            "composer_dist.distributed.process_group.init() first."
        )
    sizes = config.resolve(dist.get_world_size() if world_size is None else world_size)
    names = mesh_dim_names(sizes)
    device_type = config.device_type or process_group.device_of_group().type
    return init_device_mesh(device_type, tuple(sizes[n] for n in names), mesh_dim_names=names)


def mesh_dim_names(sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The dimensions that a mesh of these sizes has."""
    names = [name for name, size in sizes.items() if size > 1]
    if "dp_shard" not in names and (not names or sizes["dp_replicate"] > 1):
        names.append("dp_shard")
    return tuple(name for name in sizes if name in names)


def mesh_for(config: ParallelismConfig) -> DeviceMesh:
    """The mesh that a configuration asks for: the user's own one, or one built from its sizes.

    A 2-D mesh without names is rebuilt over the same groups with names, which FSDP2 insists on.

    Raises:
        ParallelismRuntimeError: used before the process group is initialized.
        ParallelismValueError: a mesh of the user's own beside sizes for another one; sizes that do not
            multiply to the world size.
    """
    own = config.fsdp2.device_mesh if config.fsdp2 else None
    if own is None:
        return build_mesh(config.mesh)
    if config.mesh != MeshConfig():
        raise ParallelismValueError(
            "Both FSDP2Config.device_mesh and ParallelismConfig.mesh say what the mesh is; give one."
        )
    if own.ndim == 2 and own.mesh_dim_names is None:
        groups = [own.get_group(dim) for dim in range(2)]
        return DeviceMesh.from_group(groups, own.device_type, own.mesh, mesh_dim_names=_DATA_PARALLEL)
    return own


def data_parallel_dims(mesh: DeviceMesh) -> list[int]:
    """Indices of the mesh dimensions over which data, and so gradients, differ: all but "cp" and "tp"."""
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    return [index for index, name in enumerate(names) if name not in {"cp", "tp"}]


def sampler_kwargs(mesh: DeviceMesh) -> dict[str, int]:
    """`num_replicas` and `rank` for a `DistributedSampler`: ranks that must see the same data are equal.

    Raises:
        ParallelismRuntimeError: this rank is not part of the mesh.
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ParallelismRuntimeError("This rank is not part of the mesh.")
    replicas, rank = 1, 0
    for dim in data_parallel_dims(mesh):
        replicas *= mesh.size(dim)
        rank = rank * mesh.size(dim) + coordinate[dim]
    return {"num_replicas": replicas, "rank": rank}


def mesh_sizes(config: ParallelismConfig, world_size: int) -> dict[str, int]:
    """The sizes of the mesh: those of the user's own mesh where there is one."""
    own = config.fsdp2.device_mesh if config.fsdp2 else None
    if own is None:
        return config.mesh.resolve(world_size)
    shape = tuple(own.mesh.shape)
    if len(shape) > 2:
        raise ParallelismValueError(
            f"device_mesh has {len(shape)} dimensions; FSDP2 takes 1 (shard) or 2 (replicate, shard)."
        )
    return {
        "dp_replicate": shape[0] if len(shape) == 2 else 1,
        "dp_shard": shape[-1],
        "cp": 1,
        "tp": 1,
    }


def agree_on_mesh(
    read_config: Callable[[], ParallelismConfig],
) -> tuple[Agreement, DeviceMesh, ParallelismConfig]:
    """Build the mesh once all ranks are known to ask for the same one: building it communicates.

    Args:
        read_config: gives this rank's configuration, or raises; then every rank does.

    Returns:
        The agreement among the mesh's ranks, the mesh, and the configuration.

    Raises:
        ParallelismValueError: the ranks ask for different meshes, or one that does not fit the world.
    """
    settings, error, asked = ParallelismConfig(), None, ""
    try:
        settings = read_config()
        world, _ = process_group.world_and_rank()
        asked = f"{mesh_sizes(settings, world)} on {settings.mesh.device_type or 'the default device'}"
    except Exception as caught:
        error = caught
    own = settings.fsdp2.device_mesh if settings.fsdp2 else None
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
