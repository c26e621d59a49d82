"""Meshes: from sizes, from the user, and who sees which data."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.mesh import MeshConfig
from composer_dist.config.parallelism import ParallelismConfig, resolve_config
from composer_dist.config.replicate import DDPConfig
from composer_dist.distributed import build_mesh, plan_parallelism, sampler_kwargs
from composer_dist.distributed.mesh.build import mesh_for, mesh_sizes
from composer_dist.distributed.mesh.dimensions import mesh_dim_names, roles
from composer_dist.distributed.mesh.mesh import Mesh, fsdp_mesh, submesh
from composer_dist.distributed.prepared import mesh_of, record
from composer_dist.errors import ParallelismRuntimeError, ParallelismValueError
from tests.kit.world import on_ranks


@pytest.mark.promise(2)
def test_a_mesh_needs_a_process_group() -> None:
    with pytest.raises(ParallelismRuntimeError, match="A mesh needs a process group"):
        build_mesh(MeshConfig())


@pytest.mark.promise(3)
@pytest.mark.parametrize(
    ("ranks", "sizes", "replicas", "own"),
    [
        (2, {"tp": 2}, 1, [0, 0]),
        (2, {"dp_shard": 2}, 2, [0, 1]),
        (2, {"dp_replicate": 2}, 2, [0, 1]),
        (4, {"dp_shard": 2, "tp": 2}, 2, [0, 0, 1, 1]),
        (4, {"dp_shard": 2, "cp": 2}, 2, [0, 0, 1, 1]),
        (4, {"dp_replicate": 2, "dp_shard": 2}, 4, [0, 1, 2, 3]),
    ],
)
@on_ranks("ranks")
def test_who_sees_which_data(ranks: int, sizes: dict[str, int], replicas: int, own: list[int]) -> None:
    expected = {"num_replicas": replicas, "rank": own[dist.get_rank()]}
    assert sampler_kwargs(build_mesh(MeshConfig(**sizes))) == expected
    if ranks == 4 and "tp" in sizes:
        assert sampler_kwargs(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))) == expected


def test_dimensions_of_size_one_are_left_out() -> None:
    def names(**sizes: int) -> tuple[str, ...]:
        return mesh_dim_names({"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, **sizes})

    assert names() == ("dp_shard",)
    assert names(dp_replicate=2) == ("dp_replicate", "dp_shard")
    assert names(dp_replicate=2, cp=2) == ("dp_replicate", "cp")
    assert names(cp=2, tp=2) == ("cp", "tp")
    assert names(tp=2) == ("dp_shard", "tp")  # FSDP2, where it casts or offloads
    assert names(dp_replicate=2, dp_shard=2, tp=2) == ("dp_replicate", "dp_shard", "tp")


@pytest.mark.promise(89)
@pytest.mark.parametrize(
    ("shape", "names", "expected"),
    [
        ((4,), None, None),
        ((4,), ("world",), ("world",)),
        ((2, 2), None, ("dp_replicate", "dp_shard")),
        ((2, 2), ("outer", "inner"), ("outer", "inner")),
    ],
)
@on_ranks(4)
def test_the_users_mesh_is_kept_over_the_same_groups(
    shape: tuple[int, ...], names: Any, expected: Any
) -> None:
    own = init_device_mesh("cpu", shape, mesh_dim_names=names)
    mesh = mesh_for(resolve_config(FSDP2Config(device_mesh=own)).mesh).device_mesh
    assert (mesh.mesh_dim_names, tuple(mesh.shape)) == (expected, shape)
    assert all(mesh.get_group(dim) is own.get_group(dim) for dim in range(mesh.ndim))
    assert sampler_kwargs(mesh)["rank"] == dist.get_rank()


def _fake(world_size: int, rank: int = 0) -> None:
    dist.init_process_group("fake", rank=rank, world_size=world_size)


FSDP_MESHES: list[tuple[dict[str, int], Any]] = [
    ({"dp_shard": 4}, (("dp_shard",), [0, 1, 2, 3])),
    ({"dp_replicate": 2, "dp_shard": 2}, (("dp_replicate", "dp_shard"), [[0, 1], [2, 3]])),
    ({"dp_replicate": 4, "dp_shard": 1}, (("dp_replicate", "dp_shard"), [[0], [1], [2], [3]])),
    ({"tp": 4, "dp_shard": 1}, (("dp_shard",), [3])),
    ({"cp": 4, "dp_shard": 1}, (("cp",), [0, 1, 2, 3])),
    ({"dp_shard": 2, "tp": 2}, (("dp_shard",), [1, 3])),
    ({"dp_shard": 2, "cp": 2}, (("dp_shard_cp",), [0, 1, 2, 3])),
    ({"dp_replicate": 2, "dp_shard": 1, "tp": 2}, (("dp_replicate", "dp_shard"), [[1], [3]])),
    ({"dp_replicate": 2, "dp_shard": 1, "cp": 2}, (("dp_replicate", "cp"), [[0, 1], [2, 3]])),
    ({"dp_shard": 2, "cp": 2, "tp": 2}, (("dp_shard_cp",), [1, 3, 5, 7])),
    (
        {"dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2},
        (("dp_replicate", "dp_shard_cp"), [[1, 3, 5, 7], [9, 11, 13, 15]]),
    ),
]


@pytest.mark.promise(3)
@pytest.mark.parametrize(("sizes", "expected"), FSDP_MESHES)
def test_fsdp_shards_over_all_but_the_tensor_parallel_ranks(sizes: dict[str, int], expected: Any) -> None:
    config = MeshConfig(**sizes)
    world = math.prod(config.sizes().values())
    _fake(world, world - 1)
    mesh = build_mesh(config)
    found = fsdp_mesh(mesh)
    assert (None if found is None else (found.mesh_dim_names, found.mesh.tolist())) == expected
    assert {name: mesh.size(i) for name, i in roles(mesh).items() if mesh.size(i) > 1} == {
        name: size for name, size in config.sizes().items() if size > 1
    }
    for name, size in config.sizes().items():
        part = submesh(mesh, name)
        assert (1 if part is None else part.size()) == size
    assert fsdp_mesh(mesh) == found


def test_sharding_beside_tensor_and_context_parallelism() -> None:
    """What others build on: FSDP2 takes the mesh for a model that is tensor parallel already."""
    _fake(16, 5)
    mesh = build_mesh(MeshConfig(dp_replicate=2, dp_shard=2, cp=2, tp=2))
    with torch.device("meta"):
        model = nn.Linear(16, 16)
    parallelize_module(model, submesh(mesh, "tp"), ColwiseParallel())
    fully_shard(model, mesh=fsdp_mesh(mesh))
    assert model.weight.device_mesh.mesh_dim_names == ("dp_replicate", "dp_shard_cp", "tp")
    assert model.weight.to_local().shape == (2, 16)


@pytest.mark.promise(3)
@on_ranks(4)
def test_sums_along_each_dimension() -> None:
    mesh = build_mesh(MeshConfig(dp_shard=2, cp=2))
    sums = []
    for part in (submesh(mesh, "dp_shard"), submesh(mesh, "cp"), fsdp_mesh(mesh)):
        value = torch.tensor(float(dist.get_rank()))
        assert part is not None
        dist.all_reduce(value, group=part.get_group())
        sums.append(value.item())
    assert sums == [[2, 1, 6], [4, 1, 6], [2, 5, 6], [4, 5, 6]][dist.get_rank()]


@pytest.mark.promise(89)
@pytest.mark.parametrize(
    ("shape", "names", "sizes", "fsdp"),
    [
        ((8,), ("tp",), (1, 1, 1, 8), None),
        ((4, 2), ("data_parallel", "tensor_parallel"), (1, 4, 1, 2), ("data_parallel",)),
        ((2, 2, 2), ("outer", "inner", "tp"), (2, 2, 1, 2), ("outer", "inner")),
        ((2, 2, 2), ("dp", "cp", "tp"), (1, 2, 2, 2), ("dp_shard_cp",)),
        ((2, 4), ("dp_replicate", "fsdp"), (2, 4, 1, 1), ("dp_replicate", "fsdp")),
        ((8, 1), ("dp_shard", "cp"), (1, 8, 1, 1), ("dp_shard",)),
    ],
)
def test_a_mesh_of_the_user_s_own_is_read_by_its_names(
    shape: tuple[int, ...], names: tuple[str, ...], sizes: tuple[int, ...], fsdp: Any
) -> None:
    _fake(8)
    own = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for config in (ParallelismConfig(mesh=own), ParallelismConfig(fsdp2=FSDP2Config(device_mesh=own))):
        mesh = resolve_config(config).mesh
        assert mesh_for(mesh).device_mesh is own
        assert tuple(mesh_sizes(mesh, 8).values()) == sizes
        found = mesh_for(mesh).fsdp
        assert (found and found.mesh_dim_names) == fsdp


@pytest.mark.promise(89)
@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ((2, 2, 2), None),
        ((2, 4), ("dp_shard", "dp_replicate")),
        ((2, 4), ("tp", "dp")),
        ((2, 4), ("dp_shard", "other")),
        ((2, 2, 2), ("pp", "dp", "shard")),
    ],
)
def test_a_mesh_that_cannot_be_read_is_refused(shape: tuple[int, ...], names: Any) -> None:
    _fake(8)
    own = init_device_mesh("cpu", shape, mesh_dim_names=names)
    with pytest.raises(
        ParallelismValueError, match="Name them dp_replicate, dp_shard, cp, tp, in this order"
    ):
        mesh_sizes(own, 8)


@pytest.mark.promise(89)
def test_a_mesh_that_only_replicates_is_for_ddp() -> None:
    _fake(4)
    own = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_replicate",))
    with pytest.raises(
        ParallelismValueError, match="add a dimension dp_shard of size 1, or replicate by DDP"
    ):
        plan_parallelism(nn.Linear(2, 2), ParallelismConfig(mesh=own), world_size=4)
    config = ParallelismConfig(mesh=own, ddp=DDPConfig())
    assert plan_parallelism(nn.Linear(2, 2), config, world_size=4).mesh["dp_replicate"] == 4


def test_a_prepared_model_remembers_its_whole_mesh() -> None:
    _fake(4)
    model, mesh = nn.Linear(2, 2), build_mesh(MeshConfig(dp_shard=2, cp=2))
    assert mesh_of(model) is None
    record(model).mesh = whole = Mesh(mesh)
    assert mesh_of(model) is whole
    assert mesh_of(nn.Sequential(model)) is whole
    part = fsdp_mesh(mesh)
    assert part is not None
    with pytest.raises(ParallelismValueError, match="Pass the whole mesh"):
        sampler_kwargs(part)


def test_two_answers_to_what_the_mesh_is_are_refused() -> None:
    _fake(2)
    own = init_device_mesh("cpu", (2,))
    for mesh in (MeshConfig(dp_replicate=2, dp_shard=1), MeshConfig(), init_device_mesh("cpu", (2, 1))):
        config = ParallelismConfig(mesh=mesh, fsdp2=FSDP2Config(device_mesh=own))
        with pytest.raises(ParallelismValueError, match="device_mesh and ParallelismConfig.mesh"):
            resolve_config(config)


def test_a_rank_outside_of_the_mesh_samples_nothing() -> None:
    _fake(4)
    with pytest.raises(ParallelismRuntimeError, match="not part of the mesh"):
        sampler_kwargs(DeviceMesh("cpu", [2, 3]))
