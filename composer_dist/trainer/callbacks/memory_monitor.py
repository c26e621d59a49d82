"""How much memory the ranks use."""

import psutil
import torch

from composer_dist.distributed.account import peak_of_process
from composer_dist.distributed.ranks import process_group
from composer_dist.trainer.callbacks.base import Periodic
from composer_dist.trainer.clock import Time
from composer_dist.trainer.logger import Logger
from composer_dist.trainer.state import State

_ALLOCATOR = {
    "allocated": "allocated_bytes.all.current",
    "peak_allocated": "allocated_bytes.all.peak",
    "reserved": "reserved_bytes.all.current",
    "peak_reserved": "reserved_bytes.all.peak",
    "alloc_retries": "num_alloc_retries",
}


class MemoryMonitor(Periodic):
    """Logs the memory in use, in bytes: the minimum, mean and maximum over all ranks.

    `memory/host/rss/min`, `.../mean`, `.../max`, and so on for `host/peak_rss` and, on an accelerator,
    `device/allocated`, `device/peak_allocated`, `device/reserved`, `device/peak_reserved` and the count
    `device/alloc_retries`.

    Args:
        interval: how often; an integer means epochs.
    """

    def __init__(self, interval: Time | str | int = "10ba") -> None:
        super().__init__(interval)

    def batch_end(self, state: State, logger: Logger) -> None:
        if self._every.passed(state):
            logger.log_metrics(over_ranks(memory_of(state.device)))

    def epoch_end(self, state: State, logger: Logger) -> None:
        self.batch_end(state, logger)


def memory_of(device: torch.device) -> dict[str, float]:
    """This process's memory on the host and on its device, in bytes, by name."""
    peak = float(peak_of_process())
    now = float(psutil.Process().memory_info().rss)
    memory = {"memory/host/rss": now, "memory/host/peak_rss": max(peak, now)}
    if device.type != "cpu":
        stats = torch.get_device_module(device).memory_stats(device)
        memory |= {f"memory/device/{name}": float(stats.get(key, 0)) for name, key in _ALLOCATOR.items()}
    return memory


def over_ranks(values: dict[str, float]) -> dict[str, float]:
    """Minimum, mean and maximum of each value; a collective with the same names on every rank."""
    table = process_group.rows_of_ranks(values.values())
    return {
        f"{name}/{how}": float(getattr(column, how)())
        for name, column in zip(values, table.unbind(1), strict=True)
        for how in ("min", "mean", "max")
    }
