"""Composer's three ways to average gradients over microbatches, with its own example."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from composer_dist.distributed.replication.apply import DDPSyncStrategy, ddp_sync_context
from tests.kit.toy import EXPECTED, Choices, choice_gradients
from tests.kit.world import run


# Gradients of the three choices on rank 0: within microbatch 0, within 1, and afterwards.
def accumulate(strategy: str) -> list[list[float | None]]:
    rank = torch.distributed.get_rank()
    model = DistributedDataParallel(Choices(), find_unused_parameters=True)
    seen = []
    for microbatch in range(2):
        with ddp_sync_context(model, is_final_microbatch=microbatch == 1, sync_strategy=strategy):
            loss = (model(microbatch) - (rank + 1)).square().sum() / 2
            loss.backward()
            seen.append(choice_gradients(model))
    return [*seen, choice_gradients(model)]


@pytest.mark.parametrize("strategy", list(DDPSyncStrategy))
def test_composers_table_of_gradients(strategy):
    assert run(accumulate, 2, strategy)[0] == EXPECTED[strategy]


def test_an_unknown_strategy_lists_those_there_are():
    with (
        pytest.raises(ValueError, match="'sometimes'.*single_auto_sync, multi_auto_sync, forced_sync"),
        ddp_sync_context(nn.Linear(1, 1), True, "sometimes"),
    ):
        pass
