"""The microbatch size that fits, found by all ranks together, whichever runs out of memory, and where."""

import re
from collections.abc import Sequence
from itertools import product
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam

from composer_dist import _torch
from composer_dist.config.mesh import MeshConfig
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.config.replicate import DDPConfig
from composer_dist.config.tensor_parallel import TPConfig
from composer_dist.errors import ParallelismError
from tests.kit.compare import fails_alike, weights
from tests.kit.grids import in_the_default_run, slow
from tests.kit.training import (
    BATCHES,
    At,
    Tagger,
    batches,
    my_rank,
    on_parts,
    recovers,
    same_training,
    short_of_memory,
)
from tests.kit.world import World, on_ranks

pytestmark = pytest.mark.promise(99)
FITS = 2
"""Samples that fit into the memory of the rank that is short of it."""
CONFIGS: dict[str, ParallelismConfig] = {
    "fsdp": ParallelismConfig(),
    "hsdp": ParallelismConfig(mesh=MeshConfig(dp_replicate=2)),
    "ddp": ParallelismConfig(ddp=DDPConfig()),
    "tp": ParallelismConfig(
        mesh=MeshConfig(tp=2, dp_shard=1),
        tp=TPConfig(plan={"body.layers.0": "colwise_gather", "body.layers.1": "rowwise_split"}),
    ),
}


class Counting(nn.Module):
    """Counts the samples that it has seen, in a buffer, and drops some of the features."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return nn.functional.dropout(x, 0.1) * (1 + self.seen / 100)


class Model(Tagger):
    """A tagger with a buffer that each forward changes, and randomness."""

    def __init__(self) -> None:
        super().__init__()
        self.counting = Counting()

    def forward(self, batch: Any) -> Any:
        return self.counting(super().forward(batch))


def train(
    kind: str | None,
    size: Any,
    place: str | None = None,
    who: int = 1,
    parts: Sequence[int] = (4, 4),
    **options: Any,
) -> tuple[list[float], dict[str, Tensor], list[int]]:
    """Losses, weights and the sizes of all microbatches that were begun."""
    torch.manual_seed(0)
    model, sizes = Model(), list[int]()
    options |= {"gradient_clipping": 1.0, "seed": 3, "device_train_microbatch_size": size}
    trainer, log = on_parts(
        [],
        CONFIGS[kind] if kind else None,
        model,
        optimizers=Adam(model.parameters(), lr=0.1),
        train_dataloader=batches(parts[:1], 0) if kind == "tp" else batches(parts, my_rank()),
        callbacks=At(before_forward=lambda state: sizes.append(len(state.batch["input_ids"]))),
        **options,
    )
    if place is not None and my_rank() == who:
        short_of_memory(model, place, FITS)
    trainer.fit()
    assert trainer.state.device_train_microbatch_size == FITS
    return log.values("loss/train/total"), weights(model), sizes


def found_and_given(kind: str, places: list[str], who: int, **options: Any) -> list[tuple[Any, Any]]:
    return [(train(kind, "auto", place, who, **options), train(kind, FITS, **options)) for place in places]


PLACES = ["body.embed backward", "body.layers.1 forward", "body.layers.0 backward", "body.head backward"]


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        pytest.param("fsdp", "sharded", marks=recovers),
        pytest.param("fsdp", "unsharded", marks=[recovers, pytest.mark.slow]),
        slow("ddp", "sharded"),
        slow("tp", "sharded"),
    ],
)
def test_auto_is_the_size_that_fits_whichever_rank_is_short(world2: World, kind: str, how: str) -> None:
    """As if the run had begun with that size: losses, weights, buffers, random numbers."""
    for who in (0, 1):
        for results in world2(found_and_given, kind, PLACES if who else PLACES[:1], who, accumulate=how):
            for found, given in results:
                same_training(found[:2], given[:2])
                assert found[2][-2 * BATCHES :] == given[2] == [FITS] * 2 * BATCHES
                assert len(found[2]) > len(given[2])


@recovers
@pytest.mark.parametrize("place", in_the_default_run(PLACES[0], among=PLACES[:2]))
def test_auto_under_hsdp_whose_groups_do_not_all_meet(world4: World, place: str) -> None:
    """Rank 3 is short; ranks 0 and 2 share no group with it, or enter collectives before they hear of it."""
    for ((found, given),) in world4(found_and_given, "hsdp", [place], 3, parts=[4, 4, 4, 4]):
        same_training(found[:2], given[:2])


def test_auto_in_one_process_counts_the_optimizers_memory_too() -> None:
    """Ranks of other sizes, and a batch that fits only until the optimizer has its state."""
    found, given = train(None, "auto", PLACES[0], 0, parts=[8]), train(None, FITS, parts=[8])
    same_training(found[:2], given[:2])
    assert found[2][:3] == [8, 4, 2]

    model = Model()
    trainer, _ = on_parts([4], None, model, device_train_microbatch_size="auto")
    trainer.fit(duration="1ba")
    assert trainer.state.device_train_microbatch_size == 4
    short_of_memory(model, "body.head forward", FITS)
    trainer.fit(duration="1ba")
    assert trainer.state.device_train_microbatch_size == FITS


@on_ranks(2)
def test_a_torch_that_cannot_end_a_step_is_refused() -> None:
    text = f"FSDP2 needs torch 2.13; this is {torch.__version__}"
    with patch.object(_torch, "forgets_iterations", False), fails_alike(ParallelismError, text):
        on_parts([2, 1], CONFIGS["fsdp"], Model(), device_train_microbatch_size="auto")


def nothing_fits(kind: str) -> None:
    """Inside a forward or after it; nor does a user's mistake look like a lack of memory."""
    one = "device_train_microbatch_size='auto': not even a single sample fits.*Rank 1: OutOfMemoryError: full"
    other = r"Rank 1: ValueError: the labels are wrong \(at 'microbatches of 2 samples'\)"
    errors = ((torch.OutOfMemoryError("full"), one), (ValueError("the labels are wrong"), other))
    for (error, text), inside in product(errors, (False, True)):
        torch.manual_seed(0)
        model, fail = Model(), Mock(side_effect=error if my_rank() == 1 else None, return_value=None)
        callbacks = [] if inside else [At(before_loss=fail)]
        if inside:
            model.body.head.register_forward_pre_hook(fail)
        options = {"device_train_microbatch_size": "auto", "callbacks": callbacks}
        with fails_alike(ParallelismError) as caught:
            on_parts([2, 1], CONFIGS[kind], model, **options)[0].fit()
        assert re.fullmatch(text, str(caught.value), re.DOTALL)


@pytest.mark.parametrize("kind", [pytest.param("fsdp", marks=recovers), "ddp"])
def test_where_not_even_one_sample_fits_all_ranks_say_so(world2: World, kind: str) -> None:
    world2(nothing_fits, kind)
