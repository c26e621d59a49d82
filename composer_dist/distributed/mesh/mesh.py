"""The device mesh: its dimensions, its groups, and this rank's place in it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from composer_dist import _torch
from composer_dist.distributed.mesh.dimensions import DIMENSIONS, FLATTENED, SYNONYMS, roles
from composer_dist.distributed.mesh.layout import Coordinate
from composer_dist.errors import ParallelismRuntimeError, ParallelismValueError


class Mesh:
    """A device mesh, made by `build_mesh` or the user's own, with its sizes, groups and ranks."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.device_mesh = mesh
        """As torch has it."""

    @classmethod
    def known(cls, mesh: DeviceMesh) -> Mesh:
        """One object, with the same parts, for one mesh of torch.

        Models on one mesh share its parts too: torch 2.13 finds an equal part of another model in a cache of
        DTensor's, and cannot compile both.
        """
        if (found := _recent.get(id(mesh))) is None:
            if len(_recent) == 8:
                _recent.clear()
            found = _recent[id(mesh)] = cls(mesh)
        return found

    @classmethod
    def of(cls, tensor: DTensor) -> Mesh:
        """The mesh of a sharded tensor; tensors of one mesh share one object."""
        return cls.known(tensor.device_mesh)

    @cached_property
    def dims(self) -> Mapping[str, int]:
        """Each of `DIMENSIONS` that the mesh has to its index; see `roles`."""
        return roles(self.device_mesh)

    @property
    def sizes(self) -> dict[str, int]:
        """Each of `DIMENSIONS` to its size."""
        return {n: self.device_mesh.size(self.dims[n]) if n in self.dims else 1 for n in DIMENSIONS}

    @property
    def size(self) -> int:
        """How many ranks it has."""
        return self.device_mesh.size()

    @cached_property
    def ranks(self) -> list[int]:
        """All its global ranks."""
        ranks: list[int] = self.device_mesh.mesh.flatten().tolist()
        return ranks

    @property
    def rank(self) -> int:
        """This process's global rank."""
        return self.device_mesh.get_rank()

    @cached_property
    def table(self) -> torch.Tensor:
        """The global ranks as `(replicas, shards, tp)`, int; parts of a tensor differ within a replica."""
        shape = (self.sizes["dp_replicate"], -1, self.sizes["tp"])
        return self.device_mesh.mesh.reshape(shape)

    @cached_property
    def here(self) -> Coordinate:
        """This rank's place."""
        return self.at(self.rank)

    def at(self, rank: int) -> Coordinate:
        """The place of a global rank."""
        _, shard, tp = (self.table == rank).nonzero()[0].tolist()
        return Coordinate(shard, self.table.shape[1], tp, self.table.shape[2])

    def replica(self, rank: int) -> list[int]:
        """The global ranks of the replica that a rank belongs to, in the order of the table."""
        ranks: list[int] = self.table[int((self.table == rank).nonzero()[0, 0])].flatten().tolist()
        return ranks

    def first_along(self, *dimensions: str) -> list[int]:
        """The global ranks that are the first along each of these dimensions."""
        table = self.device_mesh.mesh
        for name in dimensions:
            if name in self.dims:
                table = table.narrow(self.dims[name], 0, 1)
        ranks: list[int] = table.flatten().tolist()
        return ranks

    @property
    def device_type(self) -> str:
        """Such as "cpu" or "cuda"."""
        return self.device_mesh.device_type

    @property
    def device(self) -> torch.device:
        """This process's device."""
        if self.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self.device_type, torch.accelerator.current_device_index())

    def along(self, dimension: str) -> DeviceMesh | None:
        """The 1-D mesh of this rank and its peers along one of `DIMENSIONS`; None where it has no peers."""
        index = self.dims.get(dimension)
        if index is None or self.device_mesh.size(index) == 1:
            return None
        return self.device_mesh if self.device_mesh.ndim == 1 else self._part(index)

    @cached_property
    def tp(self) -> DeviceMesh | None:
        """The ranks that share this rank's matrices."""
        return self.along("tp")

    @cached_property
    def cp(self) -> DeviceMesh | None:
        """The ranks that share this rank's sequences."""
        return self.along("cp")

    @cached_property
    def fsdp(self) -> DeviceMesh | None:
        """The mesh that FSDP2 gets, over which data, and so gradients, differ: all but "tp".

        It has one dimension (shard) or two (replicate, shard). Ranks that share a sequence share the
        parameters too, over "dp_shard" and "cp" flattened to one. None for a mesh that has nothing but "tp".
        """
        wide = [n for n in ("dp_shard", "cp") if n in self.dims and (n == "dp_shard" or self.sizes[n] > 1)]
        kept = [self.dims[n] for n in ("dp_replicate", *wide) if n in self.dims]
        if len(wide) < 2:
            if len(kept) == self.device_mesh.ndim:
                return self.device_mesh
            return self._part(*kept) if kept else None
        flat = _torch.flatten_mesh(self._part(*(self.dims[n] for n in wide)), FLATTENED)
        if "dp_replicate" not in self.dims:
            return flat
        return _torch.concatenate_meshes(self._part(self.dims["dp_replicate"]), flat)

    def make_groups(self) -> None:
        """Make the groups that the mesh still lacks; all its ranks call this together."""
        _ = self.fsdp

    @property
    def replica_group(self) -> dist.ProcessGroup:
        """The ranks that hold replicas under DDP: all of the mesh, whose other dimensions have size 1."""
        names = self.device_mesh.mesh_dim_names or ()
        return self.device_mesh.get_group("dp_replicate" if "dp_replicate" in names else 0)

    def sampler_kwargs(self) -> dict[str, int]:
        """See the function `sampler_kwargs`."""
        coordinate = self.device_mesh.get_coordinate()
        if coordinate is None:
            raise ParallelismRuntimeError("This rank is not part of the mesh.")
        names = self.device_mesh.mesh_dim_names or ("",) * self.device_mesh.ndim
        if FLATTENED in names:
            raise ParallelismValueError(
                f"The dimension {FLATTENED!r} does not distinguish ranks that share data. Pass the "
                "whole mesh, Preparation.mesh."
            )
        replicas, rank = 1, 0
        for dim, name in enumerate(names):
            if SYNONYMS.get(name) not in {"cp", "tp"}:
                replicas *= self.device_mesh.size(dim)
                rank = rank * self.device_mesh.size(dim) + coordinate[dim]
        return {"num_replicas": replicas, "rank": rank}

    def _part(self, *dims: int) -> DeviceMesh:
        names = self.device_mesh.mesh_dim_names
        assert names is not None, "a mesh of several dimensions has names"
        return self.device_mesh[tuple(names[dim] for dim in dims)]


_recent: dict[int, Mesh] = {}
"""By the identity of torch's mesh, which each of them keeps alive."""


def submesh(mesh: DeviceMesh, dimension: str) -> DeviceMesh | None:
    """The 1-D mesh of this rank and its peers along one of `DIMENSIONS`; None where it has no peers."""
    return Mesh(mesh).along(dimension)


def fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    """The mesh that FSDP2 gets: see `Mesh.fsdp`.

    The first call for a mesh may make groups, so all ranks make it together; `build_mesh` has made it.
    """
    return Mesh(mesh).fsdp


def sampler_kwargs(mesh: DeviceMesh) -> dict[str, int]:
    """`num_replicas` and `rank` for a `DistributedSampler`: ranks that must see the same data are equal.

    Raises:
        ParallelismRuntimeError: this rank is not part of the mesh.
        ParallelismValueError: a mesh in which data and context parallelism are flattened to one dimension.
    """
    return Mesh(mesh).sampler_kwargs()


def forget_meshes() -> None:
    """Drop what `Mesh.known` keeps, which holds the meshes' process groups."""
    _recent.clear()
