"""How much memory full states take beyond what they are, and beyond the shards."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composer_dist.checkpoint import (
    full_model_state,
    full_optimizer_state,
    load_full_model_state,
    load_full_optimizer_state,
)
from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.mesh import MeshConfig
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.config.tensor_parallel import TPConfig
from composer_dist.distributed import parallelize_model
from composer_dist.distributed.ranks.agreement import Agreement
from tests.kit.measure import messages, profiled
from tests.kit.world import on_ranks

MIB = 1 << 20
BUCKET = 8 * MIB


def sized() -> nn.Module:
    """32 MiB, of which one tensor is two buckets, and 400 are small."""
    model = nn.Sequential(nn.Linear(1024, 4096, bias=False), nn.Linear(4096, 1024))
    model.append(nn.ModuleList(nn.Linear(16, 16) for _ in range(200)))
    return model


@pytest.mark.promise(42)
@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
@on_ranks(lambda tp: 2 * tp)
def test_no_rank_holds_more_than_two_buckets_beyond_its_result(tp: int) -> None:
    """What is held at one time, by torch's allocator."""
    model, states = sized(), {}
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    plan = TPConfig(plan={"0": "colwise", "1": "rowwise"}) if tp > 1 else None
    config = ParallelismConfig(mesh=MeshConfig(tp=tp), fsdp2=FSDP2Config(), tp=plan)
    parallelize_model(model, config, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    result = sum(parameter.nbytes for parameter in model.parameters()) if dist.get_rank() == 0 else 0
    in_this_thread = mock.patch.object(Agreement, "collectively", lambda self, step, body: body())
    with messages(BUCKET) as sent, in_this_thread:  # where the profiler looks
        for what, call, given in (
            ("gather the model", lambda: states.update(model=full_model_state(model)), result),
            ("gather state", lambda: states.update(state=full_optimizer_state(model, optimizer)), result),
            ("load the model", lambda: load_full_model_state(model, states["model"]), 0),
            ("load state", lambda: load_full_optimizer_state(model, optimizer, states["state"]), 0),
        ):
            held = profiled(call) - given
            assert held <= 2 * BUCKET, f"{what}: {held / MIB:.1f} MiB"
    assert max(sent) <= BUCKET
    assert len(sent) <= 2 * 6 * tp, "many small tensors share a message"
