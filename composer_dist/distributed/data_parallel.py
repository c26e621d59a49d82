"""Replicated data parallelism: when gradients are averaged while microbatches accumulate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

import torch
import torch.distributed as dist
from torch import nn

from composer_dist.distributed import process_group
from composer_dist.distributed.gradients import no_sync
from composer_dist.errors import ParallelismValueError


class DDPSyncStrategy(StrEnum):
    """When the gradients of a replicated model are averaged; Composer's names."""

    SINGLE_AUTO_SYNC = "single_auto_sync"
    """In the last microbatch's backward, for what all microbatches have left. (Older versions of torch
    left out parameters that only earlier microbatches used, which Composer's documentation warns of.)"""
    MULTI_AUTO_SYNC = "multi_auto_sync"
    """In every microbatch's backward."""
    FORCED_SYNC = "forced_sync"
    """Once, after the last microbatch's backward, whichever parameters it used."""


@contextmanager
def ddp_sync_context(
    model: nn.Module, is_final_microbatch: bool, sync_strategy: DDPSyncStrategy | str
) -> Iterator[None]:
    """Run one microbatch's forward and backward of a replicated model.

    Args:
        model: wrapped in DistributedDataParallel, or prepared; its gradients accumulate.
        is_final_microbatch: whether the optimizer steps after it.

    Raises:
        ParallelismValueError: there is no such strategy.
    """
    try:
        strategy = DDPSyncStrategy(sync_strategy)
    except ValueError:
        known = ", ".join(DDPSyncStrategy)
        raise ParallelismValueError(
            f"There is no DDP sync strategy {sync_strategy!r}; there are {known}."
        ) from None
    automatic = strategy is DDPSyncStrategy.MULTI_AUTO_SYNC or (
        strategy is DDPSyncStrategy.SINGLE_AUTO_SYNC and is_final_microbatch
    )
    with no_sync(model, enabled=not automatic):
        yield
    if strategy is DDPSyncStrategy.FORCED_SYNC and is_final_microbatch:
        _average_gradients(model)


@torch.no_grad()
def _average_gradients(model: nn.Module) -> None:
    """Replace every gradient by its mean over the ranks, those of unused parameters counting as zero."""
    world, _ = process_group.world_and_rank()
    if world == 1:
        return
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    used = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int32)
    used = process_group.all_reduce(used, "max")
    for parameter, somewhere in zip(parameters, used.tolist(), strict=True):
        if somewhere:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(world)
