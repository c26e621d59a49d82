"""What the delivery of weights sends and reads, against real preparations and by hand."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from composer_dist.config.mesh import MeshConfig
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.config.replicate import DDPConfig
from composer_dist.config.tensor_parallel import TPConfig
from composer_dist.distributed import parallelize_model, plan_parallelism
from composer_dist.distributed.plan.topology import Topology
from composer_dist.distributed.ranks.agreement import Agreement
from tests.kit.measure import Collectives
from tests.kit.world import on_ranks

pytestmark = pytest.mark.promise(112)


class Wide(nn.Module):
    """A matrix whose parts are large enough for messages of their own, small ones, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1024, 1027), nn.Linear(1027, 33)])
        self.register_buffer("scale", torch.ones(7), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.scale.sum()


STYLES = TPConfig(plan={"layers.0": "colwise_gather"})
WAYS: dict[str, Callable[..., ParallelismConfig]] = {
    "fsdp2": lambda **given: ParallelismConfig(**given),
    "hsdp": lambda **given: ParallelismConfig(mesh=MeshConfig(dp_replicate=2, dp_shard=2), **given),
    "ddp": lambda **given: ParallelismConfig(ddp=DDPConfig(), **given),
    "fsdp2 x tp": lambda **given: ParallelismConfig(mesh=MeshConfig(dp_shard=2, tp=2), tp=STYLES, **given),
    "replicas x tp": lambda **given: ParallelismConfig(
        mesh=MeshConfig(dp_replicate=2, dp_shard=1, tp=2), tp=STYLES, **given
    ),
}


def planned(config: ParallelismConfig, **how: Any) -> tuple[Counter[Any], int]:
    """What this rank sends, and the bytes that it reads."""
    plan = plan_parallelism(Wide(), config, world_size=4)
    sent: Counter[Any] = Counter()
    read = 0
    for row in plan.communication(rank=dist.get_rank(), **how):
        if row.phase == "start-up" and row.collective == "read":
            read += row.bytes
            assert row.seconds == 0
        elif row.phase == "start-up":
            sent[row.collective] += row.bytes
            sent[row.collective, "count"] += row.count
            assert row.seconds > 0
    return sent, read


def sent_by(prepare: Callable[[], Any]) -> tuple[Any, Counter[Any]]:
    """What a function returns, and what it sends, which is only seen in this thread."""
    with (
        mock.patch.object(Agreement, "collectively", lambda agreement, step, call: call()),
        Collectives() as found,
    ):
        done = prepare()
    sent: Counter[Any] = Counter()
    for collective, _, nbytes in found.sent:
        sent[collective] += nbytes
        sent[collective, "count"] += 1
    return done, sent


@pytest.mark.parametrize("way", WAYS)
@on_ranks(4)
def test_rank_0s_weights_by_messages(way: str) -> None:
    config = WAYS[way](sync="rank0", transport="messages", bucket_bytes=2 << 20)
    expected, read = planned(config)
    done, sent = sent_by(lambda: parallelize_model(Wide(), config))
    assert sent == expected
    assert done.transport == "messages"
    assert read == 0


@pytest.mark.parametrize("way", ["hsdp", "fsdp2 x tp"])
@on_ranks(4)
def test_rank_0s_weights_from_its_memory(way: str) -> None:
    config = WAYS[way](sync="rank0", transport="memory")
    expected, read = planned(config)
    done, sent = sent_by(lambda: parallelize_model(Wide(), config))
    assert sent == expected
    assert read == (done.bytes_moved if dist.get_rank() else 0)


@pytest.mark.parametrize("way", WAYS)
@on_ranks(4)
def test_weights_from_files(way: str, tmp_path: Path) -> None:
    if dist.get_rank() == 0:
        save_file(Wide().state_dict(), tmp_path / "model.safetensors")
    dist.barrier()
    config = WAYS[way]()
    expected, read = planned(config, weights="files")
    done, sent = sent_by(lambda: parallelize_model(Wide(), config, weights=tmp_path))
    assert sent == expected
    assert read == done.bytes_read or dist.get_rank() == 0
    dist.barrier()


def test_a_few_bytes_by_hand() -> None:
    """Rows of (4, 3) among two ranks of two replicas each, with a bias; and one that is large."""
    model = nn.Linear(3, 4)
    mesh = MeshConfig(dp_replicate=2, dp_shard=2)
    plan = plan_parallelism(model, ParallelismConfig(mesh=mesh, sync="rank0"), world_size=4)

    def rows(rank: int, **how: Any) -> list[tuple[str, str, int, int]]:
        found = [one for one in plan.communication(rank=rank, **how) if one.phase == "start-up"]
        return [(one.collective, one.dimension, one.count, one.bytes) for one in found]

    part = 2 * 3 * 4 + 2 * 4
    spread = ("broadcast", "dp_replicate", 1, part)
    assert rows(0) == rows(1) == [("send", "dp_shard", 1, part), spread]
    assert rows(2) == rows(3) == [spread]
    assert rows(1, weights="files") == [("read", "files", 1, part)]
    plain = plan_parallelism(model, ParallelismConfig(mesh=mesh), world_size=4)
    assert [one.phase for one in plain.communication() if one.phase == "start-up"] == []
    large = plan_parallelism(nn.Linear(1024, 1024), ParallelismConfig(sync="rank0"), world_size=2)
    (one,) = [one for one in large.communication(rank=1) if one.phase == "start-up"]
    assert (one.collective, one.dimension, one.bytes) == ("read", "memory of rank 0", 1025 * 512 * 4)
    apart = Topology(ranks_per_host=1, within=1e9, between=1e9)
    (one,) = [one for one in large.communication(rank=1, topology=apart) if one.phase == "start-up"]
    assert (one.collective, one.count, one.bytes) == ("send", 2, 1025 * 512 * 4)
