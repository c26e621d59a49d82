"""The account of a preparation, which `parallelize_model` returns."""

import logging
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composer_dist.distributed.plan.plan import ParallelPlan
from composer_dist.distributed.plan.text import mesh_in_words, table
from composer_dist.distributed.replication.replica import replica_of
from composer_dist.wording import human_bytes, listed

_log = logging.getLogger("composer_dist")


@dataclass
class Preparation:
    """The prepared model and the account of its preparation; prints as a table."""

    model: nn.Module
    plan: ParallelPlan
    mesh: DeviceMesh
    plain_parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    """Parameters that are not DTensors, by name. Gradients of trainable ones are averaged, except those in
    `DDPConfig.ignored`."""
    timings: dict[str, float] = field(default_factory=dict)
    """Step to seconds, in the order of the steps."""
    initialized: tuple[str, ...] = ()
    """Tensors that were on the meta device on every rank, and that initializers have written."""
    bytes_moved: int = 0
    """Bytes that this rank sent, received and read while weights were delivered."""
    bytes_read: int = 0
    """Bytes that this rank read from the files given as `weights`."""
    transport: str = "messages"
    """How weights were sent: "memory" if the ranks read the source's memory, else "messages"."""
    peak_memory: int = 0
    """The most bytes that this process held at a time: allocated on the accelerator, or resident in host
    memory if the model is there."""

    @property
    def seconds(self) -> float:
        """Wall time of the whole preparation."""
        return sum(self.timings.values())

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time a step of the recipe."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.timings[name] = self.timings.get(name, 0.0) + time.perf_counter() - start

    def close(self) -> None:
        """At the end of training, unless by a failure, log advice on the configuration on rank 0, if any."""
        if sys.exception() is not None:
            return
        replica = replica_of(self.model)
        alone = self.plan.world_size == 1
        if replica is not None and not alone and (hint := replica.hint()) and self.mesh.get_rank() == 0:
            _log.warning(hint)

    def __str__(self) -> str:
        plan = self.plan
        mesh, sharded = mesh_in_words(plan.mesh), sum(unit.nbytes for unit in plan.units)
        rows = {
            "ranks": f"{plan.world_size} ({mesh})" if mesh else str(plan.world_size),
            "units": str(len(plan.units)),
            "sharded parameters": f"{len(plan.parameter_units)} ({human_bytes(sharded)})",
            "replicated parameters": str(len(plan.plain)),
        }
        if self.initialized:
            rows["initialized"] = f"{len(self.initialized)}: {listed(self.initialized, 3)}"
        way = {"memory": "read from memory", "messages": "by messages"}[self.transport]
        moved = f"{human_bytes(self.bytes_moved)} {way}" if self.bytes_moved else "none"
        rows["bytes moved by this rank"] = moved
        if self.bytes_read:
            rows["bytes read by this rank"] = human_bytes(self.bytes_read)
        where = "resident" if self.mesh.device_type == "cpu" else "allocated"
        rows["peak memory of this rank"] = f"{human_bytes(self.peak_memory)} {where}"
        steps = ", ".join(f"{step} {seconds:.2f}" for step, seconds in self.timings.items())
        rows["seconds"] = f"{self.seconds:.2f} ({steps})"
        return table("Preparation", {"": "left", " ": "right"}, rows.items())


def reset_peak(device: torch.device) -> None:
    """Restart the measurement of the peak, where the system allows it."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
        return
    with suppress(OSError):  # not Linux, or not permitted: the process's peak so far counts too
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM: see man 5 proc


def peak(device: torch.device) -> int:
    """Bytes at the highest point since `reset_peak`."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return peak_of_process()


def peak_of_process() -> int:
    """The most bytes of memory that this process has had."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024
