"""float16 with a loss scaler, deterministic algorithms, compilation."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import StepLR

from composer_dist.config.replicate import DDPConfig
from composer_dist.errors import ParallelismValueError
from composer_dist.trainer import LossScaling
from tests.kit.compare import close, weights
from tests.kit.training import At, classifier, fitted, fitted_on_parts, quiet, tagger
from tests.kit.world import World


def overflow(state: Any) -> None:
    """The loss of the second batch is too large for float16, on one rank."""
    if state.timestamp.batch == 1 and state.rank == state.world_size - 1:
        state.loss = state.loss * torch.inf


def half(config: Any, precision: str = "amp_fp16") -> tuple[list[bool], list[float], dict[str, Tensor]]:
    """Which batches moved the weights, the scales, and the weights after the first batch."""
    states = [weights(tagger())]
    trainer, log = fitted_on_parts(
        [3, 3] if config else [6],
        config,
        schedulers=lambda optimizer: StepLR(optimizer, 100),
        step_schedulers_every_batch=True,
        precision=precision,
        loss_scaling=LossScaling(init_scale=1024.0, growth_interval=2) if precision == "amp_fp16" else None,
        gradient_clipping=1.0,
        callbacks=At(after_loss=overflow, batch_end=lambda state: states.append(weights(state.model))),
    )
    moved = [any(not torch.equal(one[name], two[name]) for name in one) for one, two in pairwise(states)]
    saved = trainer.state_dict()["loss_scaler"]
    assert saved == (trainer.state.loss_scaler and trainer.state.loss_scaler.state_dict())
    return moved, log.values("loss_scale") if precision == "amp_fp16" else [], states[1]


@pytest.mark.promise(100)
@pytest.mark.parametrize("config", [None, "fsdp", DDPConfig()])
def test_float16_skips_the_step_of_an_infinity_on_any_rank(world2: World, config: Any) -> None:
    for moved, scales, first in [half(None)] if config is None else world2(half, config):
        assert moved == [True, False, True, True]
        assert scales == [1024.0, 1024.0, 512.0, 512.0]
        close(first, half(None, "fp32")[2], rtol=1e-2, atol=1e-3)


def test_deterministic_algorithms_until_close() -> None:
    trainer, _ = quiet(deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    trainer.close()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.slow
def test_a_compiled_model_trains_as_it_is() -> None:
    plain, compiled = classifier(), classifier()
    for model, options in ((plain, False), (compiled, {"backend": "eager"})):
        fitted(model, compile=options, device="cpu")
    close(weights(plain), weights(compiled))
    with pytest.raises(ParallelismValueError, match=r"Pass ParallelismConfig\(compile=\.\.\.\) instead"):
        quiet(compile=True, parallelism_config="fsdp")
