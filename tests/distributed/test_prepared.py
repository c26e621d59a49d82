"""Parameters by name, whatever wraps or shards the model."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor

from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.distributed import parallelize_model
from composer_dist.distributed.prepared import (
    check_usable,
    mark_unusable,
    named_buffers_canonical,
    named_parameters_canonical,
    of,
    record,
    usable_or_marked,
)
from composer_dist.errors import CheckpointRuntimeError, ParallelismRuntimeError
from composer_dist.structure.names import canonical_name
from tests.kit import models
from tests.kit.world import World


def test_wrapper_segments_are_left_out() -> None:
    assert canonical_name("_orig_mod.layers.0._checkpoint_wrapped_module.up.weight") == "layers.0.up.weight"
    assert canonical_name("") == ""


@pytest.mark.promise(28)
def test_names_do_not_show_wrappers() -> None:
    model = models.tied()
    names = [name for name, _ in model.named_parameters()]
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    model.layers[0].register_buffer("table", torch.zeros(1))
    assert [name for name, _ in named_parameters_canonical(model)] == names
    everything = [name for name, _ in named_parameters_canonical(model, remove_duplicate=False)]
    assert set(everything) - set(names) == {"head.weight"}
    assert [name for name, _ in named_buffers_canonical(model)] == ["layers.0.table"]


def _after_eval(reshard: bool | int) -> bool:
    model = models.B()
    parallelize_model(model, FSDP2Config(reshard_after_forward=reshard))
    before = dict(model.named_parameters())
    with torch.no_grad():
        model.eval()(models.batch(model))
    now = dict(named_parameters_canonical(model))
    assert all(isinstance(parameter, DTensor) for parameter in now.values())
    return all(now[name] is before[name] for name in before)


@pytest.mark.promise(103)
@pytest.mark.parametrize("reshard", [True, False, 2])
def test_an_evaluation_leaves_the_optimizer_s_parameters(world4: World, reshard: bool | int) -> None:
    assert all(world4(_after_eval, reshard))


def test_an_unusable_model_names_the_cause_in_every_call() -> None:
    model = models.M()
    check_usable(model)
    mark_unusable(model, "rank 1 is lost")
    for call in (check_usable, lambda m: m(torch.zeros(1, 8)), lambda m: list(named_parameters_canonical(m))):
        with pytest.raises(ParallelismRuntimeError, match="unusable.*rank 1 is lost"):
            call(model)
    with pytest.raises(ParallelismRuntimeError, match="rank 1 is lost"):
        copy.deepcopy(model)(torch.zeros(1, 8))


def test_an_error_marks_the_optimizer_too() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(KeyError), usable_or_marked(model, optimizer):
        raise KeyError("lr")
    with pytest.raises(CheckpointRuntimeError, match="SGD is unusable.*lr"):
        optimizer.step()
    with pytest.raises(ParallelismRuntimeError, match="lr"):
        check_usable(model)


def test_a_copy_of_a_model_is_not_prepared() -> None:
    model = nn.Linear(2, 2)
    assert of(model) is None
    record(model).proven = {True}
    record(model).original_class = nn.BatchNorm1d
    assert record(model) is of(model)
    copied = record(copy.deepcopy(model))
    assert (copied.proven, copied.original_class) == (set(), nn.BatchNorm1d)
