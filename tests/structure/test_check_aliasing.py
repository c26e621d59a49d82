"""What is bound to a parameter behind its back is refused by name before anything changes."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from composer_dist.structure.check_aliasing import check_aliasing
from composer_dist.structure.structure import read_structure
from tests.kit.huggingface import tied_llama

pytestmark = pytest.mark.promise(104)


def layers() -> nn.Module:
    return nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})


def view_as_attribute(model: nn.Module) -> None:
    model.a.turned = model.a.weight.detach().t()


def view_as_buffer(model: nn.Module) -> None:
    model.a.register_buffer("first", model.a.weight.detach()[:2])


def two_parameters_over_one_storage(model: nn.Module) -> None:
    model.b.weight = nn.Parameter(model.a.weight.data)


def attribute(model: nn.Module) -> None:
    vars(model.b)["theirs"] = model.a.weight


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value

    def call(self) -> Any:
        return self.value


class Slotted:
    __slots__ = ("__value",)

    def __init__(self, value: Any) -> None:
        self.__value = value


HOLDERS: list[Callable[[Any], Any]] = [
    Holder,
    Slotted,
    lambda value: [value.data[:2]],
    lambda value: Holder({"deep": [Slotted(value)]}),
    lambda value: Holder(value).call,
    lambda value: functools.partial(torch.add, value),
    lambda value: lambda x, own=value: x + own,
    lambda value: Holder(nn.ParameterList([value])),
]


@pytest.mark.parametrize("hold", HOLDERS)
def test_a_parameter_that_an_object_holds_is_refused(hold: Callable[[Any], Any]) -> None:
    model = layers()
    model.b.held = hold(model.a.weight)
    with pytest.raises(ValueError, match=r"a\.weight is also held inside of b\.held"):
        check_aliasing(read_structure(model), {})


def test_objects_may_hold_the_model_and_its_optimizer() -> None:
    model = layers()
    for module in model.modules():
        module.trainer = Holder([model, torch.optim.SGD(model.parameters(), 0.1), Holder(model)])
        module.trainer.me = module.trainer
    check_aliasing(read_structure(model), {})


class Scaled(nn.Parameter):
    """A parameter with behavior of its own."""


def subclass(model: nn.Module) -> None:
    model.a.weight = Scaled(torch.zeros(4, 4))


@pytest.mark.parametrize(
    ("bind", "message"),
    [
        (view_as_attribute, r"a\.weight and a\.turned share memory|a\.turned and a\.weight share memory"),
        (view_as_buffer, r"a\.(weight|first) and a\.(weight|first) share memory"),
        (two_parameters_over_one_storage, r"a\.weight and b\.weight share memory"),
        (attribute, r"a\.weight is also held as a plain attribute or buffer \(b\.theirs\)"),
        (subclass, r"a\.weight is a Scaled; sharding would make it a plain .*register_tensor_codec"),
    ],
)
def test_it_is_refused_unless_it_stays_whole(bind: Callable[[nn.Module], None], message: str) -> None:
    model = layers()
    bind(model)
    structure = read_structure(model)
    with pytest.raises(ValueError, match=message):
        check_aliasing(structure, {})
    check_aliasing(structure, dict.fromkeys(structure.parameters, "Rule(shard=False)"))


@pytest.mark.promise(22)
def test_a_tie_that_was_lost_on_the_meta_device_is_refused_and_tie_weights_mends_it() -> None:
    model = tied_llama()
    check_aliasing(read_structure(model), {})
    model.to("meta")
    text = r"lm_head\.weight and model\.embed_tokens\.weight are tied by the configuration.*tie_weights\(\)"
    with pytest.raises(ValueError, match=text):
        check_aliasing(read_structure(model), {})
    model.tie_weights()
    check_aliasing(read_structure(model), {})


def test_a_weight_that_spectral_norm_computes_before_each_forward_is_fine() -> None:
    model = layers()
    nn.utils.spectral_norm(model.a)
    assert model.a.weight.data_ptr() == model.a.weight_orig.data_ptr()
    check_aliasing(read_structure(model), {})
    model.a.other = model.a.weight_orig.data
    with pytest.raises(ValueError, match=r"a\.(weight_orig|other) and a\.(weight_orig|other) share"):
        check_aliasing(read_structure(model), {})


def test_ties_neighbors_in_one_storage_and_copies_are_fine() -> None:
    model = layers()
    model.b.weight = model.a.weight
    flat = torch.zeros(12)
    model.a.bias, model.b.bias = nn.Parameter(flat[:4]), nn.Parameter(flat[4:8])
    model.a.copy = model.a.weight.detach().clone()
    check_aliasing(read_structure(model), {})
    with torch.device("meta"):
        check_aliasing(read_structure(layers()), {})
