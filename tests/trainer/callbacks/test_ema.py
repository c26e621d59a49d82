"""Averages of shards are the shards of the averages."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD

from composer_dist.config.replicate import DDPConfig
from composer_dist.errors import ParallelismValueError
from composer_dist.trainer import EMA, Callback
from tests.kit.compare import close, weights
from tests.kit.training import batches, quiet, tagger
from tests.kit.world import World


class Seen(Callback):
    """The weights after each batch, and those that are evaluated."""

    def __init__(self) -> None:
        self.trained: list[dict[str, Tensor]] = []
        self.evaluated: list[dict[str, Tensor]] = []

    def batch_end(self, state: Any, logger: Any) -> None:
        self.trained.append(weights(state.model))

    def eval_start(self, state: Any, logger: Any) -> None:
        self.evaluated.append(weights(state.model))


def averaged(config: Any) -> tuple[Seen, dict[str, Tensor], dict[str, Tensor]]:
    model = tagger()
    mine = batches([3, 3] if config else [6], dist.get_rank() if dist.is_initialized() else 0)
    seen, ema = Seen(), EMA("2ba")
    trainer, _ = quiet(
        model,
        optimizers=SGD(model.parameters(), lr=0.5),
        train_dataloader=mine,
        eval_dataloader=mine,
        eval_interval="2ba",
        max_duration="1ep",
        parallelism_config=config,
        callbacks=[seen, ema],
        device="cpu",
    )
    trainer.fit()
    saved = trainer.state_dict()["callbacks"]["EMA/0"]
    other = EMA("2ba")
    other.load_state_dict(saved)
    with other.swapped_in(trainer.state):
        loaded = weights(model)
    return seen, loaded, weights(model)


def expected(trained: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    average = trained[0]
    for one in trained[1:]:
        average = {name: average[name] * 0.5**0.5 + one[name] * (1 - 0.5**0.5) for name in average}
    return average


def test_the_average_is_evaluated_saved_and_loaded_and_training_does_not_feel_it() -> None:
    seen, loaded, after = averaged(None)
    close(seen.evaluated[0], expected(seen.trained[:2]))
    close(seen.evaluated[1], expected(seen.trained))
    close(loaded, seen.evaluated[1])
    close(after, seen.trained[-1])


def sharded() -> list[Any]:
    return [(seen.evaluated, loaded) for seen, loaded, _ in map(averaged, ("fsdp", DDPConfig()))]


def test_shards_are_averaged_to_the_same_numbers(world2: World) -> None:
    seen, _, _ = averaged(None)
    for results in world2(sharded):
        for evaluated, loaded in results:
            for one, other in zip(evaluated, seen.evaluated, strict=True):
                close(one, other)
            close(loaded, seen.evaluated[-1])


def test_times_that_make_no_average_are_refused() -> None:
    for options in (
        {"half_life": "0ba"},
        {"half_life": "0.5dur"},
        {"half_life": "1ba", "update_interval": "1ep"},
    ):
        with pytest.raises(ParallelismValueError, match="EMA's"):
            EMA(**options)
