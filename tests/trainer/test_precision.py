"""float16 with a loss scaler, deterministic algorithms, compilation."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from composer_dist.config.replicate import DDPConfig
from composer_dist.errors import ParallelismValueError
from composer_dist.trainer import LossScaling
from tests.kit.compare import close, weights
from tests.kit.training import At, classifier, loader, on_parts, quiet, tagger
from tests.kit.world import World


def overflow(state: Any) -> None:
    """The loss of the second batch is too large for float16, on one rank."""
    if state.timestamp.batch == 1 and state.rank == state.world_size - 1:
        state.loss = state.loss * torch.inf


def half(config: Any, precision: str = "amp_fp16") -> tuple[list[bool], list[float], dict[str, Tensor]]:
    """Which batches moved the weights, the scales, and the weights after the first batch."""
    model = tagger()
    optimizer = SGD(model.parameters(), lr=0.1)
    states = [weights(model)]
    trainer, log = on_parts(
        [3, 3] if config else [6],
        config,
        model,
        optimizers=optimizer,
        schedulers=StepLR(optimizer, 100),
        step_schedulers_every_batch=True,
        precision=precision,
        loss_scaling=LossScaling(init_scale=1024.0, growth_interval=2) if precision == "amp_fp16" else None,
        gradient_clipping=1.0,
        callbacks=At(after_loss=overflow, batch_end=lambda state: states.append(weights(state.model))),
    )
    trainer.fit()
    moved = [any(not torch.equal(one[name], two[name]) for name in one) for one, two in pairwise(states)]
    saved = trainer.state_dict()["loss_scaler"]
    assert saved == (trainer.state.loss_scaler and trainer.state.loss_scaler.state_dict())
    return moved, log.values("loss_scale") if precision == "amp_fp16" else [], states[1]


@pytest.mark.promise(100)
def test_float16_leaves_out_what_overflows_and_goes_on() -> None:
    moved, scales, first = half(None)
    assert moved == [True, False, True, True]
    assert scales == [1024.0, 1024.0, 512.0, 512.0]
    for name, value in half(None, "fp32")[2].items():
        torch.testing.assert_close(first[name], value, rtol=1e-2, atol=1e-3)


def on_two_ranks() -> list[Any]:
    return [half("fsdp"), half(DDPConfig())]


def test_an_infinity_on_one_rank_leaves_out_the_step_on_all(world2: World) -> None:
    _, _, whole = half(None)
    for results in world2(on_two_ranks):
        for moved, scales, first in results:
            assert moved == [True, False, True, True]
            assert scales == [1024.0, 1024.0, 512.0, 512.0]
            for name, value in whole.items():
                torch.testing.assert_close(first[name], value, rtol=1e-2, atol=1e-3)


def test_deterministic_algorithms_until_close() -> None:
    trainer, _ = quiet(classifier(), deterministic=True, train_dataloader=loader())
    assert torch.are_deterministic_algorithms_enabled()
    trainer.close()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.slow
def test_a_compiled_model_trains_as_it_is() -> None:
    plain, compiled = classifier(), classifier()
    for model, options in ((plain, False), (compiled, {"backend": "eager"})):
        trainer, _ = quiet(model, compile=options, train_dataloader=loader(), device="cpu")
        trainer.fit(duration="1ep")
    close(weights(plain), weights(compiled))
    with pytest.raises(ParallelismValueError, match=r"Pass ParallelismConfig\(compile=\.\.\.\) instead"):
        quiet(classifier(), compile=True, parallelism_config="fsdp")
