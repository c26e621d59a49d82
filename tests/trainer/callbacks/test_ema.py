"""Averages of shards are the shards of the averages."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from composer_dist.config.replicate import DDPConfig
from composer_dist.errors import ParallelismValueError
from composer_dist.trainer import EMA, State
from tests.kit.compare import close, full_each, same, weights
from tests.kit.training import At, batches, fitted_on_parts, my_rank, on_parts, seen_at, sgd, tagger
from tests.kit.world import World

Weights = dict[str, Tensor]


def averaged(config: Any) -> tuple[list[Weights], list[Weights], Weights]:
    """The weights after each batch, those that were evaluated, and those of a loaded average."""
    parts = [3, 3] if config else [6]
    trained, after_batch = seen_at("batch_end", lambda state: weights(state.model))
    evaluated, evaluating = seen_at("eval_start", lambda state: weights(state.model))
    options = {"eval_dataloader": batches(parts, my_rank()), "eval_interval": "2ba"}
    options |= {"optimizers": partial(sgd, lr=0.5), "callbacks": [after_batch, evaluating, EMA("2ba")]}
    trainer, _ = fitted_on_parts(parts, config, **options)
    other = EMA("2ba")
    other.load_state_dict(trainer.state_dict()["callbacks"]["EMA/0"])
    with other.swapped_in(trainer.state):
        loaded = weights(trainer.state.model)
    close(weights(trainer.state.model), trained[-1])
    return trained, evaluated, loaded


def expected(trained: list[Weights]) -> Weights:
    average = trained[0]
    for one in trained[1:]:
        average = {name: average[name] * 0.5**0.5 + one[name] * (1 - 0.5**0.5) for name in average}
    return average


@pytest.mark.parametrize("config", [None, "fsdp", DDPConfig()])
def test_the_average_is_evaluated_and_saved_and_training_is_unaffected(world2: World, config: Any) -> None:
    trained, *_ = averaged(None)
    for _, evaluated, loaded in [averaged(None)] if config is None else world2(averaged, config):
        assert len(evaluated) == 2
        close(evaluated[0], expected(trained[:2]))
        close(evaluated[1], expected(trained))
        close(loaded, evaluated[1])


def evaluated_at(event: str, config: Any) -> tuple[Weights, list[float]]:
    """The weights after a run in which each batch is evaluated at `event`, and the losses found there."""
    losses: list[float] = []

    def evaluate(state: State) -> None:
        losses.append(trainer.eval(batches([6], 0)[:1])["loss/eval/total"])

    parts = [3, 3] if config else [6]
    callbacks = [EMA("2ba"), At(**{event: evaluate})]
    options = {"optimizers": partial(sgd, lr=0.5), "callbacks": callbacks, "check_sampler": False}
    trainer, _ = on_parts(parts, config, **options)
    trainer.fit()
    return weights(trainer.state.model), losses


@pytest.mark.parametrize("config", [None, "fsdp", DDPConfig()])
def test_an_evaluation_between_forward_and_backward_has_the_averages(world2: World, config: Any) -> None:
    trained, losses = evaluated_at("batch_start", None)
    within = ("after_forward", config)
    for found in [evaluated_at(*within)] if config is None else world2(evaluated_at, *within):
        close(found[0], trained)
        assert found[1] == pytest.approx(losses, rel=1e-5)


def averaged_in_16_bits(config: Any) -> tuple[list[Weights], list[Weights], Weights, Weights]:
    """The weights after each batch, those that were evaluated, the averages, and loaded averages."""
    parts, ema, other = [3, 3] if config else [6], EMA("200ba"), EMA("200ba")
    trained, after_batch = seen_at("batch_end", lambda state: weights(state.model))
    evaluated, evaluating = seen_at("eval_start", lambda state: weights(state.model))
    options = {"eval_dataloader": batches(parts, my_rank()), "eval_interval": "2ba"}
    options |= {"optimizers": partial(sgd, lr=0.5), "callbacks": [after_batch, evaluating, ema]}
    trainer, _ = fitted_on_parts(parts, config, tagger().bfloat16(), precision=None, **options)
    other.init(trainer.state, trainer.logger)
    other.load_state_dict(ema.state_dict())
    same(weights(trainer.state.model), trained[-1])
    return trained, evaluated, full_each(ema.averages), full_each(other.averages)


@pytest.mark.parametrize("config", [None, "fsdp"])
def test_averages_of_16_bit_weights_have_32_bits(world2: World, config: Any) -> None:
    half = 0.5 ** (1 / 200)
    for found in [averaged_in_16_bits(None)] if config is None else world2(averaged_in_16_bits, config):
        trained, evaluated, averages, loaded = found
        exact = {name: one.double() for name, one in trained[0].items()}
        for one in trained[1:]:
            exact = {name: exact[name] * half + one[name].double() * (1 - half) for name in exact}
        assert {one.dtype for one in averages.values()} == {torch.float32}
        close({name: one.double() for name, one in averages.items()}, exact)
        same(evaluated[-1], {name: one.bfloat16() for name, one in averages.items()})
        same(loaded, averages)


def test_times_that_make_no_average_are_refused() -> None:
    for half_life, interval in (("0ba", "1ba"), ("0.5dur", "1ba"), ("1ba", "1ep")):
        with pytest.raises(ParallelismValueError, match="EMA's"):
            EMA(half_life, update_interval=interval)


class OfUnknownLength:
    def __iter__(self) -> Iterator[Any]:
        return iter(batches([6], 0))


def averages_after(half_life: str, loader: Any, epochs: int) -> tuple[list[Weights], Weights]:
    """The weights after each batch, and the averages after so many epochs."""
    trained, after_batch = seen_at("batch_end", lambda state: weights(state.model))
    ema = EMA(half_life)
    options = {"train_dataloader": loader, "max_duration": f"{epochs}ep", "optimizers": partial(sgd, lr=0.5)}
    fitted_on_parts([6], None, callbacks=[after_batch, ema], **options)
    return trained, dict(ema.averages)


def test_epochs_pass_within_them_or_as_a_whole_where_their_length_is_unknown() -> None:
    trained, in_epochs = averages_after("2ep", batches([6], 0), 2)
    _, in_batches = averages_after(f"{len(trained)}ba", batches([6], 0), 2)
    close(in_epochs, in_batches)
    trained, at_ends = averages_after("1ep", OfUnknownLength(), 3)
    first, second, third = trained[0], *trained[2 * len(trained) // 3 - 1 :: len(trained) // 3]
    after_one = trained[len(trained) // 3 - 1]
    means = {name: (first[name] + after_one[name]) / 2 for name in first}
    means = {name: (means[name] + second[name]) / 2 for name in first}
    close(at_ends, {name: (means[name] + third[name]) / 2 for name in first})
