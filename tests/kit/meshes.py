"""Every kind of mesh, as configurations."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.mesh import MeshConfig
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.config.replicate import DDPConfig
from composer_dist.config.tensor_parallel import TPConfig
from composer_dist.distributed.mesh.layout import Coordinate, Layout
from composer_dist.distributed.mesh.mesh import Mesh
from composer_dist.distributed.moving.deliver import Cargo

MESHES: dict[str, tuple[int, Any]] = {
    "plain": (1, None),
    "fsdp1": (1, FSDP2Config()),
    "fsdp2": (2, FSDP2Config()),
    "fsdp4": (4, FSDP2Config()),
    "ddp": (2, ParallelismConfig(ddp=DDPConfig())),
    "hsdp": (4, ParallelismConfig(mesh=MeshConfig(dp_replicate=2, dp_shard=2))),
    "tp": (2, ParallelismConfig(mesh=MeshConfig(dp_shard=1, tp=2), tp=TPConfig())),
    "fsdp_tp": (4, ParallelismConfig(mesh=MeshConfig(dp_shard=2, tp=2), tp=TPConfig())),
    "hsdp_tp": (4, ParallelismConfig(mesh=MeshConfig(dp_replicate=2, dp_shard=1, tp=2), tp=TPConfig())),
    "cp": (2, ParallelismConfig(mesh=MeshConfig(dp_shard=1, cp=2))),
    "fsdp_cp": (4, ParallelismConfig(mesh=MeshConfig(dp_shard=2, cp=2))),
}
"""Ways to be parallel: on how many ranks, and the configuration."""


def config(**options: Any) -> ParallelismConfig:
    """FSDP2, with small buckets unless told otherwise; `replicas` makes the mesh 2-D."""
    replicas = options.pop("replicas", 1)
    options.setdefault("fsdp2", FSDP2Config())
    options.setdefault("bucket_bytes", 512)
    return ParallelismConfig(mesh=MeshConfig(dp_replicate=replicas), **options)


def ddp(**options: Any) -> ParallelismConfig:
    """DDP on every rank; what is no field of `DDPConfig` goes beside it."""
    own = {key: options.pop(key) for key in list(options) if key in DDPConfig.__dataclass_fields__}
    return ParallelismConfig(ddp=DDPConfig(**own), bucket_bytes=512, **options)


def mine(x: Tensor) -> Tensor:
    """This rank's part of a batch."""
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def mesh(**sizes: int) -> ParallelismConfig:
    return ParallelismConfig(
        mesh=MeshConfig(**sizes), tp=TPConfig() if sizes.get("tp", 1) > 1 else None, bucket_bytes=4096
    )


BY_WORLD: dict[str, Any] = {
    "fsdp": lambda: FSDP2Config(),
    "ddp": DDPConfig,
    "hsdp": lambda: mesh(dp_replicate=2, dp_shard=dist.get_world_size() // 2),
    "tp": lambda: mesh(tp=2, dp_shard=dist.get_world_size() // 2),
    "replicas of tp": lambda: mesh(dp_replicate=2, dp_shard=1, tp=2),
}
PLACES = [
    (2, ["tp"]),
    pytest.param(2, ["ddp", "hsdp"], marks=pytest.mark.slow),
    pytest.param(4, ["tp"], marks=pytest.mark.slow),
]
"""Number of ranks, and names of `BY_WORLD` that FSDP's tests leave."""
SHAPES = [(12, 8), (7, 5), (3, 6), (6,), (1, 4), (4, 6, 5), (2, 0), (0, 3)]


def expected_part(full: torch.Tensor, layout: Layout, at: Coordinate) -> torch.Tensor:
    """The local tensor, by torch.chunk: first the tensor-parallel cut of each group, then rows."""
    if layout.tp_dim is not None:
        groups = full.chunk(layout.tp_groups, layout.tp_dim)
        full = torch.cat([cut(group, layout.tp_dim, at.tps, at.tp) for group in groups], layout.tp_dim)
    return cut(full, 0, at.shards, at.shard) if layout.rows else full


def cut(tensor: torch.Tensor, dim: int, parts: int, part: int) -> torch.Tensor:
    chunks = tensor.chunk(parts, dim)
    return chunks[part] if part < len(chunks) else tensor.narrow(dim, 0, 0)


def layouts() -> list[Layout]:
    found = []
    for shape in SHAPES:
        for rows, dim in itertools.product((True, False), (None, *range(len(shape)))):
            for groups in (1, 2, 3) if dim is not None else (1,):
                if dim is None or (shape[dim] % groups == 0 and shape[dim]):
                    found.append(Layout(shape, rows, dim, groups))
    return found


def mesh_of(replicas: int) -> DeviceMesh:
    """All ranks, sharded within each of this many replicas."""
    world = dist.get_world_size()
    if replicas == 1:
        return init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
    return init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("dp_replicate", "dp_shard"))


def awkward_tensors(dtypes: Sequence[torch.dtype] = (torch.float32,)) -> list[tuple[str, torch.Tensor]]:
    """Tensors of every awkward shape, numbered through so that no two elements are the same."""
    found: list[tuple[str, torch.Tensor]] = []
    for dtype in dtypes:
        for shape in [(7, 3), (1, 4), (5,), (2, 1, 3), (64, 40), (4, 0), (3, 2, 2)]:
            numbers = torch.arange(math.prod(shape)).remainder(120).reshape(shape) + len(found)
            found.append((f"{dtype}{shape}", numbers.to(dtype)))
        found.append((f"{dtype} scalar", torch.tensor(3).to(dtype)))
    base = torch.arange(600.0)
    found.append(("transposed", base.reshape(20, 30).t()))
    found.append(("strided", base.reshape(30, 20)[::3, ::2]))
    found.append(("expanded", base[:6].expand(9, 6)))
    found.append(("permuted", base.reshape(5, 4, 30).permute(2, 0, 1)))
    return found


def cargoes_of(everything: list[tuple[str, torch.Tensor]], mesh: Any, source: int) -> list[Cargo]:
    at, cargoes = Mesh(mesh).here, []
    for name, value in everything:
        for sharded in (True, False):
            if sharded and (value.ndim == 0 or value.numel() == 0):
                continue
            layout = Layout(tuple(value.shape), rows=sharded)
            target = torch.empty(layout.local_shape(at), dtype=value.dtype).fill_(1)
            given = value if dist.get_rank() == source else None
            cargoes.append(Cargo(name, layout, value.dtype, target, given))
    return cargoes
