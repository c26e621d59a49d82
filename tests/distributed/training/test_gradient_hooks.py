"""Gradient hooks of averaged parameters against one process that has the whole batch."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.config.rule import Rule
from composer_dist.distributed import accumulate, no_sync, parallelize_model
from composer_dist.errors import ParallelismRuntimeError
from tests.kit.compare import fails, same_parameters
from tests.kit.meshes import ddp, mesh, mine
from tests.kit.models import M
from tests.kit.toy import built
from tests.kit.world import on_ranks

pytestmark = pytest.mark.promise(104)

WAYS: dict[str, Callable[[], ParallelismConfig]] = {
    "DDP": ddp,
    "whole in FSDP2": lambda: ParallelismConfig(rules=[Rule(["0", "2"], shard=False)]),
}
AVERAGED = list(WAYS)
WAYS["FSDP2"] = ParallelismConfig
both = pytest.mark.parametrize("way", AVERAGED)


def _pair(way: str) -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))
    single = copy.deepcopy(model)
    parallelize_model(model, WAYS[way]())
    return model, single, torch.randn(3, 8, 8)


def _clip(gradient: Tensor) -> Tensor:
    return gradient * (0.02 / gradient.norm()).clamp(max=1)


def _normalize(parameter: Any) -> None:
    parameter.grad.div_(parameter.grad.norm())


@both
@on_ranks(2)
def test_they_see_the_mean(way: str) -> None:
    model, single, batches = _pair(way)
    seen: dict[nn.Module, list[Tensor]] = {}
    for one in (model, single):
        seen[one] = []
        one[0].weight.register_hook(_clip)
        one[2].weight.register_hook(_clip)
        one[2].weight.register_hook(lambda gradient: gradient + 0.5)
        one[2].bias.register_post_accumulate_grad_hook(_normalize)
        if dist.get_rank() == 0 or one is single:
            one[0].bias.register_hook(seen[one].append)
    for x in batches:  # the second and third add to the gradients of those before
        model(mine(x)).square().mean().backward()
        single(x).square().mean().backward()
        same_parameters(model, single, gradients=True)
    if dist.get_rank() == 0:
        torch.testing.assert_close(seen[model], seen[single])


@both
@on_ranks(2)
def test_a_hook_may_step_and_drop_the_gradient(way: str) -> None:
    model, single, batches = _pair(way)

    def step(parameter: Any) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad.sign(), alpha=0.1)
        parameter.grad = None

    for parameter in (*model.parameters(), *single.parameters()):
        parameter.register_post_accumulate_grad_hook(step)
    for x in batches:
        model(mine(x)).square().mean().backward()
        single(x).square().mean().backward()
        same_parameters(model, single)
    assert all(parameter.grad is None for parameter in model.parameters())


@both
@on_ranks(2)
def test_without_synchronization_they_must_be_linear(way: str) -> None:
    model, single, batches = _pair(way)
    mask = torch.tensor([[1.0], [0.0], [1.0], [0.0]])
    count: list[Tensor] = []
    for one in (model, single):
        one[0].weight.register_hook(lambda gradient: gradient * mask)
    model[0].bias.register_hook(count.append)
    with no_sync(model):
        model(mine(batches[0])).square().mean().backward()
    model(mine(batches[1])).square().mean().backward()
    for x in batches[:2]:
        single(x).square().mean().backward()
    same_parameters(model, single, gradients=True)
    assert len(count) == 2

    def top(gradient: Tensor) -> Tensor:
        return gradient * (gradient.abs() == gradient.abs().max())

    for wrong in (_clip, torch.relu, top, torch.Tensor.neg_):
        handle = model[2].weight.register_hook(wrong)
        with no_sync(model), fails(ParallelismRuntimeError, "hook of 2.weight changes", "Leave out no_sync"):
            model(mine(batches[0])).square().mean().backward()
        handle.remove()
    model[2].bias.register_post_accumulate_grad_hook(_normalize)
    with no_sync(model), fails(ParallelismRuntimeError, "hook of 2.bias changes"):
        model(mine(batches[0])).square().mean().backward()


@on_ranks(2)
def test_they_follow_what_changes_after_the_preparation() -> None:
    model, single, batches = _pair("DDP")
    handles = [one[0].weight.register_hook(_clip) for one in (model, single)]

    def both_have(x: Tensor) -> None:
        for one, part in ((model, mine(x)), (single, x)):
            one.zero_grad()
            loss = one(part).square().mean()
            between = one[2].bias.register_hook(_clip)
            loss.backward()
            between.remove()
        same_parameters(model, single, gradients=True)

    both_have(batches[0])
    for one in (model, single):
        one[2].weight.requires_grad_(False)  # DDP gets a new reducer
    both_have(batches[1])
    for handle in handles:
        handle.remove()
    both_have(batches[2])


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.always(x) + self.sometimes(x) if both else self.always(x)


@on_ranks(2)
def test_a_parameter_that_this_rank_did_not_use_has_its_hook_called() -> None:
    torch.manual_seed(3)
    model = Branch()
    single = copy.deepcopy(model)
    parallelize_model(model, ddp(find_unused_parameters=True))
    x = torch.randn(4, 8)
    for one in (model, single):
        for parameter in one.parameters():
            parameter.register_hook(_clip)
    for _ in range(2):
        model(mine(x), both=dist.get_rank() == 1).square().mean().backward()
        halves = single(x[:2], both=False).square().mean(), single(x[2:], both=True).square().mean()
        (sum(halves) / 2).backward()
        same_parameters(model, single, gradients=True)


@pytest.mark.parametrize("kind", ["fsdp2", "hsdp"])
@on_ranks(2)
def test_what_fsdp2_would_postpone_is_refused(kind: str) -> None:
    model, single = built(M), built(M)
    parallelize_model(model, ParallelismConfig() if kind == "fsdp2" else mesh(dp_replicate=2))
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    for one in (model, single):
        one[0].weight.register_post_accumulate_grad_hook(_normalize)
    with fails(ParallelismRuntimeError, "0.weight has hooks", "Leave out no_sync"), no_sync(model):
        raise AssertionError
    if kind == "fsdp2":
        for part in mine(x).chunk(2):
            with accumulate(model, last=False):  # reduces at once
                model(part).square().mean().backward()
        for part in (x[[0, 1, 4, 5]], x[[2, 3, 6, 7]]):
            single(part).square().mean().backward()
    else:
        with fails(ParallelismRuntimeError, "0.weight has hooks"), accumulate(model, last=False):
            raise AssertionError
        model(mine(x)).square().mean().backward()
        single(x).square().mean().backward()
    same_parameters(model, single, gradients=True)


@pytest.mark.parametrize("way", list(WAYS))
@on_ranks(2)
def test_gradients_that_wait_cannot_be_changed_by_hand(way: str) -> None:
    model, _, batches = _pair(way)
    weight: Any = model[2].weight
    with no_sync(model):
        model(mine(batches[0])).square().mean().backward()
    if way == "FSDP2":
        with fails(ParallelismRuntimeError, "gradient of 2.weight is not reduced", "inside of no_sync"):
            weight.grad.clamp_(-0.01, 0.01)
    else:
        weight.grad.clamp_(-0.01, 0.01)
        with fails(ParallelismRuntimeError, "gradients of 2.weight were changed", "inside of no_sync"):
            model(mine(batches[1])).square().mean().backward()
    model.zero_grad()
    assert weight.grad is None
    with no_sync(model):
        model(mine(batches[0])).square().mean().backward()
    model.zero_grad(set_to_none=False)
    model(mine(batches[1])).square().mean().backward()
    assert weight.grad is not None
