"""Meshes: from sizes, from the user, and who sees which data."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composer_dist.distributed import build_mesh, sampler_kwargs
from composer_dist.distributed.config import FSDP2Config, MeshConfig, ParallelismConfig
from composer_dist.distributed.mesh import mesh_dim_names, mesh_for
from composer_dist.errors import ParallelismRuntimeError, ParallelismValueError
from tests.conftest import World


def _sampler(**sizes: int) -> dict[str, int]:
    return sampler_kwargs(build_mesh(MeshConfig(**sizes)))


def test_p02_a_mesh_needs_a_process_group() -> None:
    with pytest.raises(ParallelismRuntimeError, match="before the process group is initialized"):
        build_mesh(MeshConfig())


def test_p03_who_sees_which_data(world2: World) -> None:
    same = [{"num_replicas": 1, "rank": 0}] * 2
    own = [{"num_replicas": 2, "rank": 0}, {"num_replicas": 2, "rank": 1}]
    assert world2(_sampler, tp=2) == same
    assert world2(_sampler, dp_shard=2) == own
    assert world2(_sampler, dp_replicate=2) == own


def test_p03_tensor_parallel_peers_see_the_same(world4: World) -> None:
    both = world4(_sampler, dp_shard=2, tp=2)
    assert [(one["num_replicas"], one["rank"]) for one in both] == [(2, 0), (2, 0), (2, 1), (2, 1)]
    assert [one["rank"] for one in world4(_sampler, dp_replicate=2, dp_shard=2)] == [0, 1, 2, 3]


def test_dimensions_of_size_one_are_left_out() -> None:
    def names(**sizes: int) -> tuple[str, ...]:
        return mesh_dim_names({"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, **sizes})

    assert names() == ("dp_shard",)
    assert names(dp_replicate=2) == ("dp_replicate", "dp_shard")
    assert names(tp=2) == ("tp",)
    assert names(dp_replicate=2, dp_shard=2, tp=2) == ("dp_replicate", "dp_shard", "tp")


def _own_mesh(shape: tuple[int, ...], names: tuple[str, ...] | None) -> Any:
    own = init_device_mesh("cpu", shape, mesh_dim_names=names)
    mesh = mesh_for(ParallelismConfig(fsdp2=FSDP2Config(device_mesh=own)))
    same_groups = all(mesh.get_group(dim) is own.get_group(dim) for dim in range(mesh.ndim))
    return mesh.mesh_dim_names, tuple(mesh.shape), same_groups, sampler_kwargs(mesh)["rank"]


@pytest.mark.parametrize(
    ("shape", "names", "expected"),
    [
        ((4,), None, None),
        ((4,), ("world",), ("world",)),
        ((2, 2), None, ("dp_replicate", "dp_shard")),
        ((2, 2), ("outer", "inner"), ("outer", "inner")),
    ],
)
def test_p89_the_users_mesh_is_kept_over_the_same_groups(
    world4: World, shape: tuple[int, ...], names: Any, expected: Any
) -> None:
    assert world4(_own_mesh, shape, names) == [(expected, shape, True, rank) for rank in range(4)]


def _own_tp_mesh() -> dict[str, int]:
    return sampler_kwargs(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))


def test_p03_the_users_own_names_beside_tp(world4: World) -> None:
    assert [one["rank"] for one in world4(_own_tp_mesh)] == [0, 0, 1, 1]


def _fake(world_size: int) -> None:
    dist.init_process_group("fake", rank=0, world_size=world_size)


def test_two_answers_to_what_the_mesh_is_are_refused() -> None:
    _fake(2)
    own = init_device_mesh("cpu", (2,))
    config = ParallelismConfig(
        mesh=MeshConfig(dp_replicate=2, dp_shard=1), fsdp2=FSDP2Config(device_mesh=own)
    )
    with pytest.raises(ParallelismValueError, match="device_mesh and ParallelismConfig.mesh"):
        mesh_for(config)


def test_a_rank_outside_of_the_mesh_samples_nothing() -> None:
    _fake(4)
    with pytest.raises(ParallelismRuntimeError, match="not part of the mesh"):
        sampler_kwargs(DeviceMesh("cpu", [2, 3]))
