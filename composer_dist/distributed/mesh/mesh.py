"""The device mesh: the one owner of its dimensions and their groups.

The dimensions are named "dp_replicate", "dp_shard", "cp" and "tp", outermost first. A dimension of
size 1 is left out, but "dp_shard" stays beside "dp_replicate" (FSDP2 tells replication from sharding by
the number of dimensions) and beside "tp" alone (FSDP2 casts and offloads). FSDP2 shards over `fsdp_mesh`:
ranks that share a sequence share the parameters too, over "dp_shard" and "cp" flattened to "dp_shard_cp".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composer_dist import _torch
from composer_dist.config.mesh import MeshConfig
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.distributed.ranks import process_group
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.errors import ParallelismRuntimeError, ParallelismValueError


def device_of(mesh: DeviceMesh) -> torch.device:
    """This rank's device of the mesh's type."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


DIMENSIONS = ("dp_replicate", "dp_shard", "cp", "tp")
"""All dimensions, outermost first."""


_FLATTENED = "dp_shard_cp"


_SYNONYMS = {
    **{name: name for name in DIMENSIONS},
    "context_parallel": "cp",
    "tensor_parallel": "tp",
}


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
    fsdp_mesh(mesh)  # which makes the flattened dimension's groups now, on all ranks at once
    return mesh


def mesh_dim_names(sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The dimensions that a mesh of these sizes has."""
    names = [name for name, size in sizes.items() if size > 1]
    replicated = sizes["dp_replicate"] > 1 and sizes["cp"] == 1
    if "dp_shard" not in names and (names in ([], ["tp"]) or replicated):
        names.append("dp_shard")
    return tuple(name for name in sizes if name in names)


def mesh_for(config: ParallelismConfig) -> DeviceMesh:
    """The mesh that a configuration asks for: the user's own one, or one built from its sizes.

    A 2-D mesh without names is rebuilt over the same groups with names, which FSDP2 insists on.

    Raises:
        ParallelismRuntimeError: used before the process group is initialized.
        ParallelismValueError: sizes that do not multiply to the world size, or a mesh of the user's own
            that cannot be used (see `roles`).
    """
    own = own_mesh(config)
    if own is None:
        assert isinstance(config.mesh, MeshConfig)
        return build_mesh(config.mesh)
    if own.ndim == 2 and own.mesh_dim_names is None:
        groups = [own.get_group(dim) for dim in range(2)]
        return DeviceMesh.from_group(groups, own.device_type, own.mesh, mesh_dim_names=DIMENSIONS[:2])
    fsdp_mesh(own)
    return own


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


def roles(mesh: DeviceMesh) -> dict[str, int]:
    """Each of `DIMENSIONS` that a mesh has to its index there; how a mesh of the user's own is read.

    Dimensions go by their names, to which Lightning's "tensor_parallel" and "context_parallel" belong.
    Up to two of other names, or of none, are (replicate, shard), a single one shard.

    Raises:
        ParallelismValueError: more dimensions than that, or in an order that cannot be used.
    """
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    found = {_SYNONYMS[name]: index for index, name in enumerate(names) if name in _SYNONYMS}
    free = [name for name in ("dp_shard", "dp_replicate") if name not in found]
    others = [index for index, name in enumerate(names) if name not in _SYNONYMS]
    found.update(zip(free, reversed(others), strict=False))
    ordered = sorted(found, key=DIMENSIONS.index)
    if len(found) < mesh.ndim or sorted(found, key=found.__getitem__) != ordered:
        raise ParallelismValueError(
            f"The mesh has the dimensions {', '.join(name or 'without a name' for name in names)}; name them "
            f"{', '.join(DIMENSIONS)}, in this order, leaving out those that it lacks. (One or two of other "
            "names are taken for shard, or replicate and shard.)"
        )
    return {name: found[name] for name in ordered}


def submesh(mesh: DeviceMesh, dimension: str) -> DeviceMesh | None:
    """The 1-D mesh of this rank and its peers along one of `DIMENSIONS`; None where it has no peers."""
    index = roles(mesh).get(dimension)
    if index is None or mesh.size(index) == 1:
        return None
    return mesh if mesh.ndim == 1 else mesh[_names(mesh)[index]]


def fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    """The mesh that FSDP2 gets, over which data, and so gradients, differ: all but "tp".

    It has one dimension (shard) or two (replicate, shard), where shard is "dp_shard" and "cp" together.
    None for a mesh that has nothing but "tp". The first call for a mesh may make groups, so all ranks
    make it together; `build_mesh` and `mesh_for` have made it.
    """
    found = roles(mesh)
    wide = [n for n in ("dp_shard", "cp") if n in found and (n == "dp_shard" or mesh.size(found[n]) > 1)]
    kept = [n for n in ("dp_replicate", *wide) if n in found]
    if len(kept) == mesh.ndim and len(wide) < 2:
        return mesh
    names = _names(mesh)
    if len(wide) < 2:
        return mesh[tuple(names[found[name]] for name in kept)] if kept else None
    both = mesh[tuple(names[found[name]] for name in wide)]
    flat = _torch.flatten_mesh(both, _FLATTENED)
    if "dp_replicate" not in found:
        return flat
    return _torch.concatenate_meshes(mesh[names[found["dp_replicate"]]], flat)


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    assert mesh.mesh_dim_names is not None, "a mesh of several dimensions has names"
    return mesh.mesh_dim_names


def data_parallel_dims(mesh: DeviceMesh) -> list[int]:
    """Indices of the mesh dimensions over which data differ: all but "cp" and "tp".

    Raises:
        ParallelismValueError: a mesh in which data and context parallelism are flattened to one.
    """
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    if _FLATTENED in names:
        raise ParallelismValueError(
            f"In the dimension {_FLATTENED!r} ranks with the same data are not told from others; take the "
            "whole mesh: Preparation.mesh, or mesh_of(model)."
        )
    return [index for index, name in enumerate(names) if _SYNONYMS.get(name) not in {"cp", "tp"}]


def sampler_kwargs(mesh: DeviceMesh) -> dict[str, int]:
    """`num_replicas` and `rank` for a `DistributedSampler`: ranks that must see the same data are equal.

    Raises:
        ParallelismRuntimeError: this rank is not part of the mesh.
        ParallelismValueError: see `data_parallel_dims`.
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
    """Each of `DIMENSIONS` to its size: those of the user's own mesh where there is one.

    Raises:
        ParallelismValueError: sizes that do not multiply to `world_size`, or a mesh of the user's own
            that cannot be used.
    """
    own = own_mesh(config)
    if own is None:
        assert isinstance(config.mesh, MeshConfig)
        return config.mesh.resolve(world_size)
    found = roles(own)
    if "dp_replicate" in found and "dp_shard" not in found and config.ddp is None:
        raise ParallelismValueError(
            "The mesh has dp_replicate and no dp_shard, which FSDP2 cannot replicate over; add a dimension "
            "dp_shard of size 1, or replicate by DDP (ddp=DDPConfig())."
        )
    return {name: own.size(found[name]) if name in found else 1 for name in DIMENSIONS}


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
