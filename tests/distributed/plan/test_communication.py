"""Estimates of communication, against what real prepared models send, and by hand."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.mesh import MeshConfig
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.config.replicate import DDPConfig
from composer_dist.config.rule import Rule
from composer_dist.distributed import plan_parallelism
from composer_dist.distributed.plan.topology import Algorithm, Topology
from composer_dist.errors import ParallelismValueError
from tests.kit.compare import fails
from tests.kit.estimates import planned_and_real_traffic
from tests.kit.grids import in_the_default_run, slow
from tests.kit.models import VOCABULARY, B
from tests.kit.quantized import quantize
from tests.kit.world import on_ranks

pytestmark = pytest.mark.promise(112)


def config(**options: Any) -> ParallelismConfig:
    return ParallelismConfig(check_order=False, **options)


class Buffered(B):
    """With a buffer that forward does not change, and with a batch norm."""

    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.register_buffer("scale", torch.ones(3))
        self.statistics = nn.BatchNorm1d(VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.statistics(super().forward(tokens).mean(1)) * self.scale.sum()


def planned_and_sent(
    make: Callable[[], nn.Module], config: ParallelismConfig, precision: str | None = None
) -> tuple[Counter[Any], Counter[Any]]:
    """Of a step with the same tokens on all ranks, whose loss is the mean of the outputs."""
    tokens = torch.ones(4, 16, dtype=torch.long)
    return planned_and_real_traffic(make, tokens, lambda model: model(tokens).mean(), config, precision)


SHARDED: dict[str, Callable[[], ParallelismConfig]] = {
    "fsdp2": config,
    "hsdp": lambda: config(mesh=MeshConfig(dp_replicate=2, dp_shard=2)),
    "replicas": lambda: config(mesh=MeshConfig(dp_replicate=2, dp_shard=1)),
    "recomputed": lambda: config(activation_checkpointing="composable"),
    "wrapped": lambda: config(activation_checkpointing="wrapped"),
    "selective": lambda: config(activation_checkpointing="selective"),
    "kept": lambda: config(fsdp2=FSDP2Config(reshard_after_forward=False)),
    "in pairs": lambda: config(fsdp2=FSDP2Config(reshard_after_forward=2)),
    "whole norm": lambda: config(rules=[Rule("norm", shard=False)]),
    "blocks only": lambda: config(rules=[Rule("re:layers.[0-9]", shard=True)]),
}
OFTEN = ("hsdp", "replicas", "kept", "in pairs", "whole norm")


def ranks_of(kind: str) -> int:
    return 4 if kind in ("hsdp", "in pairs") else 2


@pytest.mark.parametrize("kind", in_the_default_run(*OFTEN, among=SHARDED))
@on_ranks(ranks_of)
def test_fsdp2_sends_what_the_plan_says(kind: str) -> None:
    mixed = None if kind in ("whole norm", "blocks only") else "amp_bf16"
    planned, sent = planned_and_sent(Buffered, SHARDED[kind](), mixed)
    assert dict(planned) == dict(sent), f"{planned} {sent}"


class Adapted(Buffered):
    """Two matrices in a block and the norm are trained; the units before them have no backward."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for trained in (self.layers[1].attention.q, self.layers[1].attention.v, self.norm):
            trained.requires_grad_(True)


@pytest.mark.parametrize("kind", [slow("fsdp2"), "hsdp", slow("recomputed")])
@on_ranks(ranks_of)
def test_frozen_parameters_are_gathered_and_not_reduced(kind: str) -> None:
    planned, sent = planned_and_sent(Adapted, SHARDED[kind]())
    assert dict(planned) == dict(sent), f"{planned} {sent}"


class Quantized(Buffered):
    """With matrices that are gathered as eight bits and a scale a row."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.layers:
            for layer in (block.attention.q, block.mlp.up):
                layer.weight = nn.Parameter(quantize(layer.weight.detach(), "int8"), requires_grad=False)


@on_ranks(2)
def test_quantized_parameters_are_gathered_as_they_are() -> None:
    planned, sent = planned_and_sent(Quantized, config())
    assert dict(planned) == dict(sent), f"{planned} {sent}"
    memory = plan_parallelism(Quantized(), config(), world_size=2).memory()
    assert memory.padding == plan_parallelism(Buffered(), config(), world_size=2).memory().padding


class Packed(Buffered):
    """With frozen weights in integers, as quantized models have them, and in complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.layers:
            for key, dtype in (("packed", torch.int32), ("turns", torch.complex64)):
                block.register_parameter(
                    key, nn.Parameter(torch.ones(6, 4, dtype=dtype), requires_grad=False)
                )


@on_ranks(2)
def test_what_has_no_floating_point_is_gathered_as_it_is() -> None:
    planned, sent = planned_and_sent(Packed, config(), "amp_bf16")
    assert dict(planned) == dict(sent), f"{planned} {sent}"


@pytest.mark.parametrize(
    ("precision", "options"),
    [
        (None, {"bucket_cap_mb": 0.001}),
        ("amp_bf16", {"find_unused_parameters": True}),
        *(slow(None, {}), slow("amp_bf16", {"bucket_cap_mb": 0.001}), slow("amp_bf16", {})),
        slow(None, {"find_unused_parameters": True}),
    ],
)
@on_ranks(2)
def test_ddp_sends_what_the_plan_says(precision: str | None, options: dict[str, Any]) -> None:
    planned, sent = planned_and_sent(Buffered, ParallelismConfig(ddp=DDPConfig(**options)), precision)
    assert dict(planned) == dict(sent), f"{planned} {sent}"


RING, TREE = Algorithm("ring", 1.0, 0.1, 10.0, 1.0), Algorithm("tree", 1.0, 0.1, 10.0, 0.5)


@pytest.mark.parametrize(
    ("collective", "ranks", "stride", "seconds"),
    [
        ("all_gather", 4, 1, 1 + 3 * 0.1 + 800 * 3 / 4 / 100),
        ("reduce_scatter", 4, 1, 1 + 3 * 0.1 + 800 * 3 / 4 / 100),
        ("all_reduce", 4, 1, 1 + 6 * 0.1 + 800 * 6 / 4 / 100),
        ("broadcast", 4, 1, 1 + 3 * 0.1 + 800 / 100),
        ("all_gather", 8, 1, 1 + 6 * 0.1 + 10 + 800 * 7 / 8 / 40),  # two hosts: four interfaces of 10
        ("all_gather", 2, 4, 1 + 10 + 800 / 2 / 10),  # one rank on each host, by one interface
        ("send", 2, 1, 1 + 800 / 100),
    ],
)
def test_a_collective_takes_its_start_steps_and_bytes(
    collective: str, ranks: int, stride: int, seconds: float
) -> None:
    topology = Topology(ranks_per_host=4, within=100.0, between=10.0, algorithms=(RING,))
    assert topology.seconds(collective, 800, ranks, stride) == pytest.approx(seconds)


def test_small_all_reduces_take_a_tree_over_many_hosts() -> None:
    topology = Topology(ranks_per_host=4, within=100.0, between=10.0, algorithms=(RING, TREE))
    tree = 1 + 2 * (3 * 0.1 + 4 * 10)
    assert topology.seconds("all_reduce", 0, 64) == pytest.approx(tree)
    assert topology.seconds("all_reduce", 80, 64) == pytest.approx(tree + 2 * 80 / 20)
    assert topology.seconds("all_reduce", 10**9, 64) == pytest.approx(
        1 + 96 * 0.1 + 30 * 10 + 126 / 64 * 10**9 / 40
    )


def test_a_plan_without_a_batch_runs_each_unit_once() -> None:
    """A weight of (4, 3) in a unit and one of (4, 4) that stays whole, on two hosts of two ranks."""
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 4, bias=False))
    options = config(
        mesh=MeshConfig(dp_replicate=2, dp_shard=2), rules=[Rule("0", shard=True, reshard_after_forward=True)]
    )
    plan = plan_parallelism(model, options, world_size=4)
    topology = Topology(ranks_per_host=2, within=100.0, between=10.0, algorithms=(RING,))
    rows = plan.communication(topology=topology)
    assert [(one.phase, one.collective, one.dimension, one.ranks, one.count, one.bytes) for one in rows] == [
        ("forward", "all_gather", "dp_shard", 2, 1, 48),
        ("backward", "all_gather", "dp_shard", 2, 1, 48),
        ("backward", "reduce_scatter", "dp_shard", 2, 1, 48),
        ("backward", "all_reduce", "dp_replicate", 2, 2, 24 + 68),  # with a number that says who has used it
        ("backward", "all_reduce", "dp_shard", 2, 1, 68),
    ]
    assert rows[0].seconds == pytest.approx(1 + 0.1 + 48 / 2 / 100)
    assert rows[3].seconds == pytest.approx(2 * (1 + 2 * 10) + (24 + 68) / 10)
    assert rows.how == {"count": "untraced", "bytes": "untraced", "seconds": "modeled"}
    assert all(text in str(rows) for text in ("all_reduce", "count (untraced)", "seconds (modeled)"))
    with fails(ParallelismValueError, "no topology 'h200'", "h100, a100"):
        plan.communication(topology="h200")
