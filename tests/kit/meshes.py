"""Every kind of mesh, as configurations."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.mesh import MeshConfig
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.config.replicate import DDPConfig
from composer_dist.config.tensor_parallel import TPConfig

MODES: dict[str, tuple[int, ParallelismConfig]] = {
    "fsdp": (2, ParallelismConfig(fsdp2=FSDP2Config())),
    "fsdp 4": (4, ParallelismConfig(fsdp2=FSDP2Config())),
    "hsdp": (4, ParallelismConfig(mesh=MeshConfig(dp_replicate=2))),
    "tp": (2, ParallelismConfig(mesh=MeshConfig(dp_shard=1, tp=2), tp=TPConfig())),
    "fsdp x tp": (4, ParallelismConfig(mesh=MeshConfig(tp=2), tp=TPConfig())),
    "hsdp x tp": (4, ParallelismConfig(mesh=MeshConfig(dp_replicate=2, dp_shard=1, tp=2), tp=TPConfig())),
    "ddp": (2, ParallelismConfig(ddp=DDPConfig())),
    "cp": (2, ParallelismConfig(mesh=MeshConfig(dp_shard=1, cp=2))),
    "fsdp x cp": (4, ParallelismConfig(mesh=MeshConfig(dp_shard=2, cp=2))),
}
"""Number of ranks, and the configuration."""

MESHES: dict[str, tuple[int, Any]] = {
    "plain": (1, None),
    "fsdp1": (1, FSDP2Config()),
    "fsdp2": (2, FSDP2Config()),
    "fsdp4": (4, FSDP2Config()),
    "ddp": (2, ParallelismConfig(mesh=MeshConfig(dp_replicate=2, dp_shard=1), ddp=DDPConfig())),
    "hsdp": (4, ParallelismConfig(mesh=MeshConfig(dp_replicate=2, dp_shard=2))),
    "tp": (2, ParallelismConfig(mesh=MeshConfig(dp_shard=1, tp=2), tp=TPConfig())),
    "fsdp_tp": (4, ParallelismConfig(mesh=MeshConfig(dp_shard=2, tp=2), tp=TPConfig())),
}
"""Ways to be parallel, and on how many ranks."""


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
    return x.chunk(dist.get_world_size())[dist.get_rank()]
