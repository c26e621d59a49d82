"""Memory of all ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from composer_dist.trainer import MemoryMonitor
from composer_dist.trainer.callbacks import memory_monitor
from composer_dist.trainer.callbacks.memory_monitor import memory_of, over_ranks
from tests.kit.training import fitted_on_parts
from tests.kit.world import World


def test_the_host_memory_of_this_process_is_found() -> None:
    held = torch.ones(8 << 20)
    memory = memory_of(torch.device("cpu"))
    assert memory.keys() == {"memory/host/rss", "memory/host/peak_rss"}
    assert held.nbytes < memory["memory/host/rss"] <= memory["memory/host/peak_rss"] < 1e12


@pytest.mark.gpu
def test_the_devices_memory_is_that_of_the_allocator() -> None:
    held = torch.ones(8 << 20, device="cuda")
    memory = memory_of(held.device)
    assert held.nbytes <= memory["memory/device/allocated"] <= memory["memory/device/peak_allocated"]
    assert memory["memory/device/reserved"] >= memory["memory/device/allocated"]
    assert memory["memory/device/alloc_retries"] >= 0


def logged() -> Any:
    rank = dist.get_rank()
    memory_monitor.memory_of = lambda device: {"memory/host/rss": 10.0 + 20 * rank}
    _, log = fitted_on_parts([3, 3], "fsdp", callbacks=MemoryMonitor("2ba"))
    memory_monitor.memory_of = memory_of
    return {name: [(at.batch, v) for at, v in log.data[name]] for name in log.data if "memory" in name}


def test_least_mean_and_most_of_the_ranks_are_logged_at_intervals(world2: World) -> None:
    for found in world2(logged):
        assert found == {
            "memory/host/rss/min": [(2, 10.0), (4, 10.0)],
            "memory/host/rss/mean": [(2, 20.0), (4, 20.0)],
            "memory/host/rss/max": [(2, 30.0), (4, 30.0)],
        }
    assert over_ranks({"a": 3.0}) == {"a/min": 3.0, "a/mean": 3.0, "a/max": 3.0}
