"""The names of a mesh's dimensions, and what each is for.

They are "dp_replicate", "dp_shard", "cp" and "tp", outermost first. A dimension of size 1 is left out,
except that "dp_shard" stays with "dp_replicate" (FSDP2 distinguishes replication from sharding by the number
of dimensions) and with "tp" alone (FSDP2 casts and offloads).
"""

from collections.abc import Mapping
from functools import cache

from torch.distributed.device_mesh import DeviceMesh

from composer_dist.errors import ParallelismValueError

DIMENSIONS = ("dp_replicate", "dp_shard", "cp", "tp")
"""All dimensions, outermost first."""
FLATTENED = "dp_shard_cp"
""""dp_shard" and "cp" as one dimension: the ranks over which FSDP2 shards where a mesh has both."""
SYNONYMS = {**{name: name for name in DIMENSIONS}, "context_parallel": "cp", "tensor_parallel": "tp"}
"""Names of dimensions, Lightning's among them, to ours."""


def mesh_dim_names(sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The dimensions that a mesh of these sizes has."""
    names = [name for name, size in sizes.items() if size > 1]
    replicated = sizes["dp_replicate"] > 1 and sizes["cp"] == 1
    if "dp_shard" not in names and (names in ([], ["tp"]) or replicated):
        names.append("dp_shard")
    return tuple(name for name in sizes if name in names)


def roles(mesh: DeviceMesh) -> Mapping[str, int]:
    """Each of `DIMENSIONS` that a mesh has to its index there; this is how a user's own mesh is read.

    Known names decide. Up to two dimensions with other names, or without names, are read as (replicate,
    shard), a single one as shard.
    """
    return _roles(mesh.mesh_dim_names or ("",) * mesh.ndim)


@cache
def _roles(names: tuple[str, ...]) -> Mapping[str, int]:
    found = {SYNONYMS[name]: index for index, name in enumerate(names) if name in SYNONYMS}
    free = [name for name in ("dp_shard", "dp_replicate") if name not in found]
    others = [index for index, name in enumerate(names) if name not in SYNONYMS]
    found.update(zip(free, reversed(others), strict=False))
    ordered = sorted(found, key=DIMENSIONS.index)
    if len(found) < len(names) or sorted(found, key=found.__getitem__) != ordered:
        raise ParallelismValueError(
            f"The mesh has the dimensions {', '.join(name or 'without a name' for name in names)}. Name them "
            f"{', '.join(DIMENSIONS)}, in this order; leave out those that you do not need. (One dimension "
            "with another name is read as shard, two as replicate and shard.)"
        )
    return {name: found[name] for name in ordered}
