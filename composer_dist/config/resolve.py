"""Named strategies: one word in place of a configuration, in Python, YAML and the Trainer.

A name says how the ranks share the work, and not how they are started: Lightning's "ddp_spawn",
"ddp_fork" and "ddp_notebook" mean "ddp" here, whatever has launched the processes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.mesh import MeshConfig, launched_per_host
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.config.replicate import DDPConfig
from composer_dist.config.tensor_parallel import TPConfig
from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.wording import kind_in_words, near_miss


def resolve_config(
    config: FSDP2Config | DDPConfig | ParallelismConfig | Mapping[str, Any] | str,
) -> ParallelismConfig:
    """One `ParallelismConfig` from whatever the caller has: itself, a part, a dictionary, a name."""
    match config:
        case ParallelismConfig(ddp=DDPConfig(), mesh=MeshConfig() as mesh) if (
            mesh.sizes() == MeshConfig().sizes()
        ):
            return dataclasses.replace(config, mesh=dataclasses.replace(mesh, dp_replicate=-1, dp_shard=1))
        case ParallelismConfig():
            return config
        case FSDP2Config():
            return ParallelismConfig(fsdp2=config)
        case DDPConfig():
            return ParallelismConfig(mesh=MeshConfig(dp_replicate=-1, dp_shard=1), ddp=config)
        case Mapping():
            return resolve_config(ParallelismConfig.from_dict(config))
        case str():
            from composer_dist.config.resolve import strategy_named

            return strategy_named(config)
    raise ParallelismTypeError(
        "config must be an FSDP2Config, DDPConfig, ParallelismConfig, ParallelPlan, a dictionary or "
        f"the name of a strategy, not {kind_in_words(config)}."
    )


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


def _hsdp() -> ParallelismConfig:
    mesh = MeshConfig(dp_replicate=-1, dp_shard=launched_per_host())
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
