"""Gradients under DDP in place: accumulated, unused, manual."""

import copy
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from composer_dist.distributed import clip_grad_norm, no_sync, parallelize_model
from composer_dist.distributed.replication.apply import DDPSyncStrategy, ddp_sync_context
from composer_dist.distributed.replication.reducer import replica_of
from composer_dist.errors import ParallelismRuntimeError
from tests.kit.compare import alike, close, fails, same_parameters, values
from tests.kit.meshes import ddp, mine
from tests.kit.models import M
from tests.kit.toy import EXPECTED, Choices, built, choice_gradients
from tests.kit.world import World

# Gradients


def accumulates() -> None:
    torch.manual_seed(3)
    model, single = M(), M()
    single.load_state_dict(model.state_dict())
    batches = torch.randn(3, 8, 8)
    parallelize_model(model, ddp())
    with no_sync(model):
        for x in batches[:2]:
            model(mine(x)).square().mean().backward()
    assert not alike(model, lambda p: p.grad)
    model(mine(batches[2])).square().mean().backward()
    for x in batches:
        single(x).square().mean().backward()
    same_parameters(model, single, gradients=True)
    norm = clip_grad_norm(model, 0.01)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(single.parameters(), 0.01))
    same_parameters(model, single, gradients=True)
    with no_sync(model, enabled=False):
        model(mine(batches[0])).square().mean().backward()
    single(batches[0]).square().mean().backward()
    same_parameters(model, single, gradients=True)
    with no_sync(model):  # a forward inside, its backward outside
        loss = model(mine(batches[1])).square().mean()
    loss.backward()
    single(batches[1]).square().mean().backward()
    same_parameters(model, single, gradients=True)


@pytest.mark.promise(33)
def test_accumulation_and_clipping_equal_the_full_batch(world2: World) -> None:
    world2(accumulates)


class Stepping(nn.Sequential):
    """Has a method of its own beside forward."""

    def training_step(self, x: Tensor) -> Tensor:
        return self(x).square().mean()


def by_method(**options: Any) -> None:
    torch.manual_seed(0)
    model, single = Stepping(nn.Linear(8, 4)), nn.Linear(8, 4)
    single.load_state_dict(model[0].state_dict())
    parallelize_model(model, ddp(forward_methods=["training_step"], **options))
    for step in range(2):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        model.training_step(mine(x)).backward()
        single(x).square().mean().backward()
        same_parameters(model[0], single, gradients=True)


@pytest.mark.promise(35)
def test_forward_methods_average_as_forward_does(world2: World) -> None:
    world2(by_method)
    world2(by_method, static_graph=True)


def composers_table() -> dict[str, Any]:
    found = {}
    for strategy in DDPSyncStrategy:
        model = Choices()
        parallelize_model(model, ddp(find_unused_parameters=True))
        seen = []
        for microbatch in range(2):
            with ddp_sync_context(model, microbatch == 1, strategy):
                (model(microbatch) - (dist.get_rank() + 1)).square().sum().div(2).backward()
                seen.append(choice_gradients(model))
        found[str(strategy)] = [*seen, choice_gradients(model)]
    return found


def test_composers_table_of_gradients_holds_for_a_prepared_model(world2: World) -> None:
    assert world2(composers_table)[0] == EXPECTED


class Branches(nn.Module):
    """Uses its second branch only where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor, both: bool = False) -> Tensor:
        out: Tensor = self.first(x)
        return out + self.second(x) if both else out


def unused() -> None:
    torch.manual_seed(0)
    model = Branches()
    parallelize_model(model, ddp())
    x = torch.randn(4, 8)
    model(x).sum().backward()
    with fails(RuntimeError, "second.weight, second.bias", "find_unused_parameters=True", "2 of 4"):
        model(x)
    model = Branches()
    single = copy.deepcopy(model)
    parallelize_model(model, ddp(find_unused_parameters=True))
    for both in (False, True, False):
        for one, batch in ((model, mine(x)), (single, x)):
            one.zero_grad()
            one(batch, both).square().mean().backward()
        if both:
            same_parameters(model, single, gradients=True)
        assert (model.second.weight.grad is None) == (not both)


@pytest.mark.promise(64)
def test_unused_parameters_are_named(world2: World) -> None:
    world2(unused)


def chained() -> tuple[type, type | None, str]:
    model = Branches()
    parallelize_model(model, ddp())
    model(torch.ones(4, 8)).sum().backward()
    try:
        model(torch.ones(4, 8))
    except RuntimeError as error:
        return type(error), type(error.__cause__), str(error.__cause__)
    raise AssertionError


@pytest.mark.promise(64)
def test_the_original_error_is_chained_and_its_type_kept(world2: World) -> None:
    for kind, cause, text in world2(chained):
        assert issubclass(kind, RuntimeError)
        assert cause is RuntimeError
        assert "Expected to have finished reduction in the prior iteration" in text


def hints() -> list[list[str]]:
    found: list[list[str]] = []
    handler = logging.Handler()
    handler.emit = lambda record: found[-1].append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("composer_dist").addHandler(handler)
    for options, pattern in (
        ({}, (True, True, True)),
        ({"find_unused_parameters": True}, (False, False, False)),
        ({"find_unused_parameters": True}, (False, True, False)),
        ({"static_graph": True}, (True, True, True)),
        ({}, (True,)),
    ):
        found.append([])
        done = parallelize_model(built(Branches), ddp(**options))
        for both in pattern:
            done.model(torch.ones(4, 8), both).sum().backward()
        done.close()
        done.close()
    logging.getLogger("composer_dist").removeHandler(handler)
    return found


@pytest.mark.promise(65)
def test_a_constant_graph_is_hinted_at_once_when_training_ends(world2: World) -> None:
    first, second = world2(hints)
    assert [len(texts) for texts in first] == [1, 1, 0, 0, 0]
    assert "static_graph=True" in first[0][0]
    assert second == [[]] * 5


# Manual optimization


class Manual(nn.Module):
    """Its step is its forward: two losses, two backwards, optionally a step after each."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.optimizer: torch.optim.Optimizer | None = None
        self.checks: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        losses = []
        for head in (self.left, self.right):
            loss = head(self.trunk(x).tanh()).square().mean()
            loss.backward()
            if dist.is_initialized():
                self.checks.append(alike(self, lambda p: p.grad))
            if self.optimizer is not None:
                self.optimizer.step()
                self.optimizer.zero_grad()
            losses.append(loss)
        return torch.stack(losses)


def steps(single: Manual, x: Tensor) -> None:
    """What `Manual` does, without its checks."""
    assert single.optimizer is not None
    for head in (single.left, single.right):
        head(single.trunk(x).tanh()).square().mean().backward()
        single.optimizer.step()
        single.optimizer.zero_grad()


def manual(**options: Any) -> None:
    torch.manual_seed(5)
    model = Manual()
    single = copy.deepcopy(model)
    single.optimizer, model.optimizer = SGD(single.parameters(), 0.5), SGD(model.parameters(), 0.5)
    parallelize_model(model, ddp(**options), model.optimizer)
    for step in range(3):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        model(mine(x))
        steps(single, x)
        close(values(model), values(single), rtol=1e-4)
    assert model.checks == [True] * 6


@pytest.mark.promise(66)
@pytest.mark.parametrize("static_graph", [False, True])
def test_two_backwards_and_steps_inside_of_a_forward(world2: World, static_graph: bool) -> None:
    world2(manual, static_graph=static_graph)


class Heads(nn.Module):
    """Two outputs; `apart`, they share no parameter, and `alike` each uses all of them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.trunk, self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(x).tanh()
        left, right = self.left(x if self.kind == "apart" else hidden), self.right(hidden)
        return (left * right, left + right) if self.kind == "alike" else (left, right)


class Opaque(nn.Linear):
    """Returns an object that nobody can look into."""

    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(loss=super().forward(x).square().mean())


def opaque() -> None:
    model = Opaque(8, 4)
    parallelize_model(model, ddp())
    for step in range(3):
        model.zero_grad()
        model(torch.randn(4, 8) * (dist.get_rank() + step)).loss.backward()
        assert alike(model, lambda p: p.grad)
    assert replica_of(model).could_be_static  # type: ignore[union-attr]  # the reducer has averaged


def test_outputs_of_any_kind_are_averaged_by_the_reducer(world2: World) -> None:
    world2(opaque)


def two_losses(kind: str, **options: Any) -> list[bool]:
    torch.manual_seed(5)
    model = Heads(kind)
    single = copy.deepcopy(model)
    parallelize_model(model, ddp(**options))
    between = []
    for step in range(3):
        model.zero_grad()
        single.zero_grad()
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        first, second = model(mine(x))
        first.square().mean().backward(retain_graph=True)
        between.append(alike(model, lambda p: p.grad))
        second.square().mean().backward()
        assert alike(model, lambda p: p.grad)
        for output in single(x):
            output.square().mean().backward(retain_graph=True)
        same_parameters(model, single, gradients=True)
    return between


@pytest.mark.promise(66)
@pytest.mark.parametrize("static_graph", [False, True])
def test_two_backwards_after_one_forward(world2: World, static_graph: bool) -> None:
    for kind in ("alike", "apart", "shared"):
        options = {"static_graph": True} if static_graph else {"find_unused_parameters": kind != "alike"}
        assert world2(two_losses, kind, **options) == [[True] * 3] * 2


def partly() -> None:
    with fails(
        ParallelismRuntimeError, "A second backward began", "right.weight, right.bias no gradient (2 of 6"
    ):
        two_losses("shared")


@pytest.mark.promise(66)
def test_two_partial_backwards_are_refused_by_name_where_ddp_was_not_told(world2: World) -> None:
    world2(partly)
    assert world2(two_losses, "apart") == [[False] * 3] * 2  # they become one average when all is there
