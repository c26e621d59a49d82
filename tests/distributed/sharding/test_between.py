"""What code does to parameters between a forward and its backward, where FSDP2 keeps some gathered."""

import copy
import operator
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from composer_dist import _torch
from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.distributed import parallelize_model
from composer_dist.errors import ParallelismRuntimeError
from tests.kit.compare import fails, full, same_parameters
from tests.kit.meshes import mine
from tests.kit.world import on_ranks

pytestmark = pytest.mark.promise(104)


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), nn.Tanh(), nn.Linear(8, 2))


def _x() -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def _set_none(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def _double(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(2)


def _read(model: nn.Module) -> list[Tensor]:
    return [full(parameter.grad).clone() for parameter in model.parameters() if parameter.grad is not None]


def _freeze(model: nn.Module) -> None:
    for parameter in model[2].parameters():
        parameter.requires_grad_(False)


def _triple(parameter: Any) -> None:
    parameter.grad.mul_(3)


def _hook(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(_triple)


ACTIONS: list[Callable[[Any], Any]] = [
    nn.Module.zero_grad,
    lambda model: model.zero_grad(set_to_none=False),
    _set_none,
    _double,
    _read,
    _freeze,
    _hook,
]
RESHARD: dict[str, tuple[int, bool | int]] = {"default": (2, True), "never": (2, False), "int": (4, 2)}


@pytest.mark.parametrize(("ranks", "reshard"), RESHARD.values(), ids=RESHARD)
@on_ranks("ranks")
def test_it_acts_on_what_the_optimizer_holds(ranks: int, reshard: bool | int) -> None:
    for action in ACTIONS:
        model, single = _net(), _net()
        parallelize_model(model, ParallelismConfig(fsdp2=FSDP2Config(reshard_after_forward=reshard)))
        results = []
        for one in (model, single):
            one(_x()).square().sum().backward()
            loss = one(_x()).square().sum()
            results.append(action(one))
            loss.backward()
        same_parameters(model, single, gradients=True)
        torch.testing.assert_close(*results)
        for one in (model, single):
            one.zero_grad()
            one(_x()).square().sum().backward()
        same_parameters(model, single, gradients=True)


@on_ranks(2)
def test_code_finds_what_the_optimizer_holds_there() -> None:
    model, single = _net(), _net()
    parallelize_model(model, ParallelismConfig())
    held = list(model.parameters())
    for inputs in (slice(None), slice(1), slice(4, 6)):
        for one in (model, single):
            loss = one(_x()).square().sum() + one[2](_x()).sum()
            found = list(one.parameters())
            optimizer = torch.optim.SGD(found, 0.1)
            assert one is single or all(map(operator.is_, found, held))
            loss.backward(inputs=found[inputs])
            nn.utils.clip_grad_value_(found, 0.01)
            optimizer.step()
            for parameter in found:
                parameter.grad = None
        same_parameters(model, single)


@on_ranks(2)
def test_hooks_that_fsdp2_never_calls_are_refused() -> None:
    model = _net()
    parallelize_model(model, ParallelismConfig())
    loss = model(_x()).square().sum()
    handle = model[2].weight.register_hook(torch.neg)
    loss.backward()
    with fails(ParallelismRuntimeError, "Gradient hooks (Tensor.register_hook) on 2.weight"):
        model(_x())
    handle.remove()
    model(_x())


TRANSFORMS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "vmap": lambda model, x: vmap(model)(x),
    "vmap of grad": lambda model, x: vmap(grad(lambda row: model(row).sum()))(x),
    "grad": lambda model, x: grad(lambda rows: model(rows).sum())(x),
    "jvp": lambda model, x: jvp(model, (x,), (x,))[1],
    "vjp": lambda model, x: vjp(model, x)[1](torch.ones(4, 2))[0],
    "jacrev": lambda model, x: jacrev(model)(x),
    "jacfwd": lambda model, x: jacfwd(model)(x),
    "hessian": lambda model, x: hessian(lambda row: model(row).sum())(x[0]),
}


@pytest.mark.parametrize("mode", ["fsdp", "ddp"])
@on_ranks(2)
def test_transforms_around_the_model(mode: str) -> None:
    warnings.simplefilter("ignore")  # of torch.jit, which jvp uses
    model = _net()
    single = copy.deepcopy(model)
    parallelize_model(model, mode)
    if mode == "fsdp" and not _torch.units_take_transforms:
        with fails(ParallelismRuntimeError, "transforms around the root need torch 2.13"):
            vmap(model)(_x())
        return
    for transform in (*TRANSFORMS.values(), TRANSFORMS["vjp"]):
        with torch.no_grad():
            torch.testing.assert_close(transform(model, _x()), transform(single, _x()))
        found, expected = transform(model, _x()), transform(single, _x())
        torch.testing.assert_close(found, expected)
        for one, output in ((model, found), (single, expected)):
            one.zero_grad()  # some of these gather all units for second-order gradients
            output.square().sum().backward()
        same_parameters(model, single, gradients=True)
    model.zero_grad()
    single.zero_grad()
    transform = TRANSFORMS["vmap of grad"]
    transform(model, mine(_x())).square().mean().backward()
    transform(single, _x()).square().mean().backward()
    same_parameters(model, single, gradients=True)
    for _ in range(3):  # an adversarial example, and the loss of an ordinary forward
        for one, x in ((model, mine(_x())), (single, _x())):
            one.zero_grad()
            near = x + 0.1 * TRANSFORMS["grad"](one, x).detach()
            one(near).square().mean().backward()
        same_parameters(model, single, gradients=True)
