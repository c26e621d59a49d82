"""Named strategies: one word in place of a configuration, in Python, YAML and the Trainer.

A name says how the ranks share the work, and not how they are started: Lightning's "ddp_spawn",
"ddp_fork" and "ddp_notebook" mean "ddp" here, whatever has launched the processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch.distributed as dist

from composer_dist.distributed.config import (
    DDPConfig,
    FSDP2Config,
    MeshConfig,
    ParallelismConfig,
    TPConfig,
    resolve_config,
)
from composer_dist.distributed.from_dict import near_miss
from composer_dist.errors import ParallelismValueError

_PER_HOST = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")
"""Where torchrun, Open MPI and Slurm say how many ranks each machine has."""


def register_strategy(name: str, config: Any, *, replace: bool = False) -> None:
    """Let `name` stand for a configuration wherever one is accepted. Every rank registers the same.

    Args:
        name: a new one.
        config: whatever `parallelize_model` takes as a configuration, or a function without arguments
            that returns it, called at each use.
        replace: the name may exist.

    Raises:
        ParallelismValueError: the name exists, and `replace` is not set.
        ParallelismError: `config` is none; see `resolve_config`.
    """
    if name in _strategies and not replace:
        raise ParallelismValueError(f"There is a strategy {name!r} already; pass replace=True to replace it.")
    settled = None if callable(config) else resolve_config(config)
    _strategies[name] = config if settled is None else lambda: settled


def strategy_named(name: str) -> ParallelismConfig:
    """The configuration that `name` stands for.

    Raises:
        ParallelismValueError: there is none; names those that there are.
    """
    if name not in _strategies:
        raise ParallelismValueError(
            f"There is no strategy {name!r}; there are: {', '.join(sorted(_strategies))}."
            f"{near_miss(name, _strategies)}"
        )
    try:
        return resolve_config(_strategies[name]())
    except RecursionError:
        raise ParallelismValueError(f"The strategy {name!r} stands for itself; register another.") from None


def ranks_per_host() -> int:
    """How many ranks the launcher has started on each machine; 1 without a launcher.

    Raises:
        ParallelismValueError: there are several ranks, and the launcher does not say, or another number
            than fits.
    """
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE") or 1)
    if world == 1:
        return 1
    value = next(filter(None, map(os.environ.get, _PER_HOST)), "")
    if not value.isdigit() or not int(value) or world % int(value):
        raise ParallelismValueError(
            f"How many of the {world} ranks are on each host is not known: {_PER_HOST[0]} is "
            f"{value or 'not set'}. Start with torchrun, as many on every host, or give the mesh's sizes, as "
            "in MeshConfig(dp_replicate=hosts, dp_shard=ranks_per_host)."
        )
    return int(value)


def _hsdp() -> ParallelismConfig:
    mesh = MeshConfig(dp_replicate=-1, dp_shard=ranks_per_host())
    return ParallelismConfig(mesh=mesh, fsdp2=FSDP2Config())


def _ddp() -> Iterator[tuple[str, Callable[[], Any]]]:
    for name in ("ddp", "ddp_spawn", "ddp_fork", "ddp_notebook"):
        yield name, DDPConfig
        for unused in (True, False):
            full = f"{name}_find_unused_parameters_{str(unused).lower()}"
            yield full, partial(DDPConfig, find_unused_parameters=unused)


_strategies: dict[str, Callable[[], Any]] = {
    "fsdp": lambda: ParallelismConfig(fsdp2=FSDP2Config()),
    "hsdp": _hsdp,  # replicas across hosts, shards within one
    "tp": lambda: ParallelismConfig(mesh=MeshConfig.auto(), tp=TPConfig()),
    **dict(_ddp()),
}
