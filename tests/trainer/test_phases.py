"""Fine-tuning in phases gives what a plain loop that freezes and thaws gives, however it is parallel."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from composer_dist.distributed.config import FSDP2Config, ParallelismConfig, Rule
from composer_dist.errors import CheckpointValueError, ParallelismKeyError, ParallelismValueError
from composer_dist.trainer import Callback, FineTuningPhases, NoImprovement, Phase
from tests.trainer.models import World, same, weights
from tests.trainer.phase_models import BATCHES, DDP, FSDP, PHASES, TP, adamw, by_hand, data, net, phased

Weights = dict[str, torch.Tensor]


def moved(history: list[Weights], batch: int) -> set[str]:
    """The parameters that batch number `batch` changed, by any bit."""
    before = history[batch - 1] if batch else weights(net())
    return {name for name in before if not torch.equal(before[name], history[batch][name])}


def run(config: Any, **options: Any) -> tuple[list[Weights], list[list[float]], bool]:
    trainer, _, recorder, _ = phased(config=config, **options)
    sharded = any(isinstance(p, DTensor) for p in trainer.state.model.parameters())
    trainer.fit()
    trainer.close()
    return recorder.weights, recorder.rates, sharded


def check(found: list[Weights], rates: list[list[float]]) -> None:
    head = {"module.head.weight", "module.head.bias"}
    down, up = {"module.down.weight"}, {"module.up.weight"}
    expected = by_hand()
    assert len(found) == len(expected) == BATCHES
    for batch in range(BATCHES):
        trained = head if batch < 3 else head | down if batch < 5 else head | down | up
        assert moved(found, batch) == trained, batch
        same(found[batch], expected[batch])
        # The last phase has no rate of its own: its parameter goes back to the group that it left.
        assert rates[batch] == ([0.05] if batch < 3 else [0.05, 0.02])


def test_p69_phases_on_one_process() -> None:
    found, rates, _ = run(None)
    check(found, rates)


@pytest.mark.parametrize("options", [{}, {"device_train_microbatch_size": 1}])
def test_p69_phases_under_fsdp2(world2: World, options: dict[str, Any]) -> None:
    for found, rates, sharded in world2(run, FSDP, **options):
        assert sharded
        check(found, rates)


def test_p69_phases_under_fsdp2_with_accumulation_on_whole_gradients(world2: World) -> None:
    for found, rates, _ in world2(run, FSDP, device_train_microbatch_size=1, accumulate="unsharded"):
        check(found, rates)


@pytest.mark.parametrize("options", [{}, {"device_train_microbatch_size": 1}])
def test_p70_phases_under_ddp(world2: World, options: dict[str, Any]) -> None:
    results = world2(run, DDP, **options)
    for found, rates, sharded in results:
        assert not sharded
        check(found, rates)
    for mine, other in zip(results[0][0], results[1][0], strict=True):
        assert all(torch.equal(mine[name], other[name]) for name in mine)


def test_p69_phases_under_tensor_parallelism(world2: World) -> None:
    for found, rates, sharded in world2(run, TP):
        assert sharded
        check(found, rates)


def mixed_precision() -> None:
    """A unit that was all frozen reduces, and steps, in the right dtypes after its thaw."""
    policy = {"param_dtype": "bf16", "reduce_dtype": "fp32"}
    config = {"fsdp2": {"mixed_precision": policy}, "rules": [{"match": "module.down", "shard": True}]}
    trainer, _, recorder, _ = phased(config=config)
    trainer.fit()
    assert moved(recorder.weights, 5) == {
        "module.head.weight",
        "module.head.bias",
        "module.down.weight",
        "module.up.weight",
    }
    expected = by_hand()[-1]
    for name, value in recorder.weights[-1].items():
        assert value.dtype is torch.float32
        torch.testing.assert_close(value, expected[name], rtol=0.1, atol=0.05)


def test_p69_thawed_units_keep_their_mixed_precision(world2: World) -> None:
    world2(mixed_precision)
