"""The best weights are put back, from shards, from other shards and from whole tensors."""

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate

from composer_dist.distributed.moving.gather import gather
from composer_dist.distributed.prepare import parallelize_composer_model
from composer_dist.errors import CheckpointKeyError
from composer_dist.trainer.finetuning.best import put_back, take_snapshot
from tests.kit.compare import close, same, weights
from tests.kit.phases import DDP, FSDP, TP, adamw, data, everywhere, net
from tests.kit.world import World


def trained(config: Any, steps: int) -> Any:
    model = net(norm=True)
    optimizer = adamw(model)
    if config is not None:
        parallelize_composer_model(model, optimizer, config)
    step(model, optimizer, steps)
    return model, optimizer


def step(model: Any, optimizer: Any, steps: int) -> None:
    for batch in data()[:steps]:
        model.loss(model(batch), batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def replicated(tensor: DTensor) -> DTensor:
    return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)


FORMS: dict[str, Any] = {"same": lambda tensor: tensor, "whole": gather, "replicated": replicated}
"""A checkpoint may give full tensors in place of shards, or tensors that are placed in another way."""


def in_form(value: Any, form: str) -> Any:
    if isinstance(value, dict):
        return {key: in_form(one, form) for key, one in value.items()}
    return FORMS[form](value) if isinstance(value, DTensor) else value


def back_and_forth(config: Any, form: str) -> None:
    model, optimizer = trained(config, 2)
    best = take_snapshot(model, [optimizer])
    before, mean = weights(model), model.get_buffer("module.norm.running_mean").clone()
    step(model, optimizer, 3)
    after = weights(model)
    assert not torch.equal(before["module.up.weight"], after["module.up.weight"])
    put_back(in_form(best, form), model, [optimizer])
    same(weights(model), before)
    assert torch.equal(model.get_buffer("module.norm.running_mean"), mean)
    step(model, optimizer, 3)  # moments and step counts are those of then too
    close(weights(model), after)


@pytest.mark.promise(75)
@pytest.mark.parametrize(
    ("config", "forms"),
    [(None, ["same"]), (FSDP, [*FORMS]), (DDP, ["same", "whole"]), (TP, ["same", "whole"])],
)
def test_what_is_trained_returns_with_its_moments(world2: World, config: Any, forms: list[str]) -> None:
    for form in forms:
        everywhere(world2, config, back_and_forth, form=form)


def test_state_that_came_later_is_removed_and_weights_of_another_model_are_refused() -> None:
    model, optimizer = trained(None, 0)
    best = take_snapshot(model, [optimizer])
    step(model, optimizer, 1)
    put_back(best, model, [optimizer])
    assert not optimizer.state
    best["parameters"]["elsewhere"] = torch.zeros(1)
    with pytest.raises(CheckpointKeyError, match="The model has no elsewhere"):
        put_back(best, model, [optimizer])
