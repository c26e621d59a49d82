"""A rank whose memory changes silently ends the run, and is named with the tensor and the step."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composer_dist import DDPConfig, MeshConfig, ParallelismConfig
from composer_dist.distributed.training.average_gradients import exchange
from composer_dist.distributed.verification import replicas
from composer_dist.errors import ParallelismRuntimeError, ParallelismValueError
from composer_dist.tensors.inner import local_part
from composer_dist.trainer import Callback, ReplicaCheck
from tests.kit.compare import fails, fails_alike
from tests.kit.grids import crossed
from tests.kit.training import momentum, on_parts, tagger
from tests.kit.world import on_ranks

pytestmark = pytest.mark.promise(113)


class Flip(Callback):
    """Flips a bit of a tensor on one rank, behind torch's back, once batch 1 has been trained on."""

    def __init__(self, what: str, rank: int) -> None:
        self._what, self._rank = what, rank

    def batch_end(self, state: Any, logger: Any) -> None:
        if state.timestamp.batch != 2 or state.rank != self._rank:
            return
        parameter = dict(state.model.named_parameters())["body.layers.1.weight"]
        tensors = {"weight": parameter, "buffer": state.model.body.table}
        if self._what == "state":
            tensors["state"] = state.optimizers[0].state[parameter]["momentum_buffer"]
        tensor = local_part(tensors[self._what])
        tensor.numpy(force=True).view("uint8").reshape(-1)[1] ^= 4


def count(module: nn.Module, args: Any) -> None:
    module.seen += args[0].sum()


def trainer(config: Any, what: str, rank: int, interval: str = "1ba") -> Any:
    model = tagger()
    model.body.register_buffer("table", torch.arange(6.0))
    model.body.register_buffer("seen", torch.tensor(0))  # what each rank's data make of it is not compared
    model.body.register_forward_pre_hook(count)
    callbacks = [Flip(what, rank), ReplicaCheck(interval)] if what else ReplicaCheck(interval)
    return on_parts([1] * dist.get_world_size(), config, model, optimizers=momentum, callbacks=callbacks)[0]


@crossed(
    {
        "config": ["ddp", "fsdp"],
        "what, said": [
            ("weight", "parameter body.layers.1.weight"),
            ("state", "optimizer state body.layers.1.weight momentum_buffer"),
            ("buffer", "buffer body.table"),
        ],
    }
)
@on_ranks(2)
def test_two_copies_that_differ_are_both_named(config: str, what: str, said: str) -> None:
    fit = trainer(config, what, 1).fit
    if config == "fsdp" and what != "buffer":
        fit()  # each rank alone has its shard
        return
    text = f"After batch 2, ranks that should hold the same values do not. {said}: ranks 0, 1 hold"
    with fails_alike(ParallelismRuntimeError, text):
        fit()


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ("ddp", "parameter body.layers.1.weight: rank 2 differs from ranks 0, 1, 3. Memory"),
        ("hsdp", "parameter body.layers.1.weight: ranks 0, 2 hold different values"),
    ],
)
@on_ranks(4)
def test_the_rank_that_differs_from_most_is_named(config: str, text: str) -> None:
    chosen = {"ddp": "ddp", "hsdp": ParallelismConfig(mesh=MeshConfig(dp_replicate=2, dp_shard=2))}[config]
    with fails_alike(ParallelismRuntimeError, "After batch 2", text):
        trainer(chosen, "weight", 2).fit()


@pytest.mark.parametrize("config", ["ddp", "fsdp"])
@on_ranks(2)
def test_a_check_at_intervals_sends_little(config: str) -> None:
    with mock.patch.object(replicas, "exchange", wraps=exchange) as gathered:
        fit = trainer(config, "", 0, "2ba")
        fit.fit()
    batches = fit.state.timestamp.batch
    assert [call.args[0].nbytes for call in gathered.call_args_list] == [replicas.NBYTES] * (batches // 2)
    assert replicas.NBYTES == 128


@on_ranks(2)
def test_the_end_of_the_last_epoch_is_checked() -> None:
    with fails_alike(ParallelismRuntimeError, "After batch 4, ranks that should hold the same values"):
        trainer("ddp", "weight", 1, "1ep").fit()


@on_ranks(2)
def test_local_sgd_is_refused() -> None:
    hook = DDPConfig(comm_hook="post_local_sgd", averaging_period=2)
    with fails(ParallelismValueError, "with local SGD they differ"):
        trainer(hook, "", 0).fit()
