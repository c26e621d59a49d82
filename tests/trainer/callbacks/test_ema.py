"""Averages of shards are the shards of the averages."""

from functools import partial
from typing import Any

import pytest
from torch import Tensor

from composer_dist.config.replicate import DDPConfig
from composer_dist.errors import ParallelismValueError
from composer_dist.trainer import EMA
from tests.kit.compare import close, weights
from tests.kit.training import At, batches, fitted_on_parts, my_rank, sgd
from tests.kit.world import World


class Seen(At):
    """The weights after each batch, and those that are evaluated."""

    def __init__(self) -> None:
        self.trained: list[dict[str, Tensor]] = []
        self.evaluated: list[dict[str, Tensor]] = []
        super().__init__(
            batch_end=lambda state: self.trained.append(weights(state.model)),
            eval_start=lambda state: self.evaluated.append(weights(state.model)),
        )


def averaged(config: Any) -> tuple[Seen, dict[str, Tensor], dict[str, Tensor]]:
    parts = [3, 3] if config else [6]
    seen = Seen()
    options = {"eval_dataloader": batches(parts, my_rank()), "eval_interval": "2ba"}
    options |= {"optimizers": partial(sgd, lr=0.5), "callbacks": [seen, EMA("2ba")]}
    trainer, _ = fitted_on_parts(parts, config, **options)
    other = EMA("2ba")
    other.load_state_dict(trainer.state_dict()["callbacks"]["EMA/0"])
    with other.swapped_in(trainer.state):
        loaded = weights(trainer.state.model)
    return seen, loaded, weights(trainer.state.model)


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
    for half_life, interval in (("0ba", "1ba"), ("0.5dur", "1ba"), ("1ba", "1ep")):
        with pytest.raises(ParallelismValueError, match="EMA's"):
            EMA(half_life, update_interval=interval)
