"""The device mesh that a user asks for."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Self

import torch
import torch.distributed as dist

from composer_dist.config.base import FromDict
from composer_dist.config.launched import launched_ranks
from composer_dist.errors import ParallelismTypeError, ParallelismValueError


@dataclass(frozen=True, kw_only=True)
class MeshConfig(FromDict):
    """The sizes of the device mesh's dimensions; their product is the world size.

    At most one size may be -1: it becomes the quotient of the world size and the other sizes.
    """

    dp_replicate: int = 1
    """Replicas of the sharded model (data parallel across groups, HSDP when dp_shard > 1)."""
    dp_shard: int = -1
    """Ranks over which every parameter is sharded (fully sharded data parallel)."""
    cp: int = 1
    """Context-parallel ranks, which split the sequence."""
    tp: int = 1
    """Tensor-parallel ranks, which split the matrices."""
    device_type: str | None = None
    """"cpu", "cuda", ...; None uses the process group's device type."""

    def __post_init__(self) -> None:
        for name, size in self.sizes().items():
            if not isinstance(size, int):
                raise ParallelismTypeError(f"Mesh size {name} must be an integer, not {size!r}.")
        bad = {k: v for k, v in self.sizes().items() if v < 1 and v != -1}
        if bad:
            raise ParallelismValueError(
                f"Mesh sizes must be positive, or -1 for 'the rest', but got {_spell(bad)}."
            )
        rest = [k for k, v in self.sizes().items() if v == -1]
        if len(rest) > 1:
            raise ParallelismValueError(
                f"Only one mesh size may be -1, but {' and '.join(rest)} are; give the others a number."
            )
        if self.device_type is not None:
            _check_device_type(self.device_type)

    @classmethod
    def auto(cls, ranks_per_host: int | None = None) -> Self:
        """Fabric's choice: tensor parallel within each host, sharded across hosts.

        Args:
            ranks_per_host: None reads the number from the launcher's variables.

        Raises:
            ParallelismValueError: the launcher has not set them.
        """
        return cls(tp=ranks_per_host or launched_per_host())

    def sizes(self) -> dict[str, int]:
        """Dimension name to size, outermost first."""
        return {name: getattr(self, name) for name in ("dp_replicate", "dp_shard", "cp", "tp")}

    def resolve(self, world_size: int) -> dict[str, int]:
        """The sizes with -1 filled in.

        Raises:
            ParallelismTypeError: `world_size` is not a positive integer.
            ParallelismValueError: the product is not, or cannot become, `world_size`.
        """
        if not isinstance(world_size, int) or world_size < 1:
            raise ParallelismTypeError(f"world_size must be a positive integer, not {world_size!r}.")
        sizes = self.sizes()
        known = prod(size for size in sizes.values() if size != -1)
        for name, size in sizes.items():
            if size == -1 and world_size % known == 0 and world_size >= known:
                sizes[name] = world_size // known
                known = world_size
        if known != world_size or -1 in sizes.values():
            other = "or start a multiple of" if -1 in sizes.values() else "set one to -1, or start"
            raise ParallelismValueError(
                f"The mesh {_spell(self.sizes())} does not match a world of {world_size} ranks: its sizes "
                f"multiply to {known}. Change a size, {other} {known} processes."
            )
        return sizes


def _check_device_type(device_type: str) -> None:
    """Raise unless torch knows devices of this name."""
    try:
        known = torch.device(device_type).type == device_type
    except (RuntimeError, TypeError, ValueError):
        known = False
    if not known:
        raise ParallelismValueError(
            f"device_type must be a device type such as 'cpu' or 'cuda', not {device_type!r}."
        )


def _spell(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


_PER_HOST = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")
"""The variables in which torchrun, Open MPI and Slurm give the number of ranks on each host."""


def per_host(environ: Mapping[str, str] = os.environ) -> str:
    """The number of ranks on each host as the launcher has written it; "" if it has not."""
    return next(filter(None, map(environ.get, _PER_HOST)), "")


def launched_per_host() -> int:
    """The number of ranks that the launcher has started on each host; 1 without a launcher.

    Raises:
        ParallelismValueError: there are several ranks, and the launcher has not set their number per host, or
            it does not divide the world size.
    """
    world = dist.get_world_size() if dist.is_initialized() else launched_ranks()
    if world == 1:
        return 1
    value = per_host()
    if not value.isdigit() or not int(value) or world % int(value):
        raise ParallelismValueError(
            f"The number of ranks per host is unknown for a world of {world}: {_PER_HOST[0]} is "
            f"{value or 'not set'}. Start with torchrun, with the same number on every host, or give the "
            "mesh's sizes, as in MeshConfig(dp_replicate=hosts, dp_shard=ranks_per_host)."
        )
    return int(value)
