"""A loss that is not finite stops all ranks, which name what is bad."""

from typing import Any

import pytest
import torch

from composer_dist.errors import ParallelismValueError
from composer_dist.trainer import Callback, NaNMonitor, Trainer
from tests.kit.compare import close, weights
from tests.kit.training import classifier, loader, on_parts, points, quiet, seen_at
from tests.kit.world import World


class Spoil(Callback):
    """Writes nan at one place, before a batch, on the ranks given."""

    def __init__(self, what: str, batch: int, ranks: tuple[int, ...] = (0, 1)) -> None:
        self._what, self._batch, self._ranks = what, batch, ranks

    def before_forward(self, state: Any, logger: Any) -> None:
        if state.timestamp.batch == self._batch and state.rank in self._ranks:
            if self._what == "batch":
                state.batch[0][0, 0] = torch.nan
            elif self._what == "weight":
                parameter = dict(state.model.named_parameters())["body.layers.0.weight"]
                with torch.no_grad():
                    getattr(parameter, "_local_tensor", parameter)[0, 0] = torch.nan


def message(trainer: Trainer, **fit: Any) -> str:
    with pytest.raises(ParallelismValueError) as caught:
        trainer.fit(duration="1ep", **fit)
    return str(caught.value)


def test_a_bad_batch_is_named_and_the_weights_stay() -> None:
    before, keep = seen_at("batch_end", lambda state: weights(state.model))
    trainer, _ = quiet(callbacks=[Spoil("batch", 1), NaNMonitor(), keep])
    text = message(trainer, train_dataloader=[points(4)[:] for _ in range(3)])
    assert text.startswith("The loss of batch 2 is nan. Not finite: the batch's '0' on rank 0. The opt")
    close(weights(trainer.state.model), before[-1])


def test_an_overflowing_loss_has_no_bad_tensor_but_the_gradients() -> None:
    model: Any = classifier()
    loss = model.loss
    model.loss = lambda outputs, batch: loss(outputs, batch) * torch.inf
    trainer, _ = quiet(model, train_dataloader=loader(), callbacks=NaNMonitor())
    assert "is inf. Not finite: the gradient of 'module.0.weight' on rank 0." in message(trainer)


def test_a_complex_parameter_is_looked_at() -> None:
    model: Any = classifier()
    model.turn = torch.nn.Parameter(torch.tensor([complex(1, torch.nan)]))
    loss = model.loss
    model.loss = lambda outputs, batch: loss(outputs, batch) * model.turn.imag.sum()
    trainer, _ = quiet(model, train_dataloader=loader(), callbacks=NaNMonitor())
    assert "is nan. Not finite: the parameter 'turn' on rank 0." in message(trainer)


def spoilt(config: str, ranks: tuple[int, ...]) -> str:
    return message(on_parts([3, 3], config, callbacks=[Spoil("weight", 2, ranks), NaNMonitor()])[0])


def test_all_ranks_stop_and_name_the_parameter_and_where(world2: World) -> None:
    where = "Not finite: the parameter 'body.layers.0.weight' on rank"
    for text in world2(spoilt, "fsdp", (1,)):
        assert text.startswith(f"The loss of batch 3 is nan. {where} 1. ")
    for text in world2(spoilt, "ddp", (0, 1)):
        assert text.startswith(f"The loss of batch 3 is nan. {where} 0, 1. ")


def test_it_looks_at_intervals() -> None:
    trainer, _ = quiet(callbacks=[Spoil("batch", 0), NaNMonitor("3ba")])
    text = message(trainer, train_dataloader=[points(4)[:] for _ in range(3)])
    assert text.startswith("The loss of batch 3 is nan. Not finite: the parameter 'module.0.weight'")


def test_it_looks_at_the_last_batch_of_an_epoch() -> None:
    trainer, _ = quiet(callbacks=[Spoil("batch", 0), NaNMonitor("1ep")])
    text = message(trainer, train_dataloader=[points(4)[:] for _ in range(3)])
    assert text.startswith("The loss of batch 3 is nan. ")
