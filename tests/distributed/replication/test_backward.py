"""Gradients under DDP in place: accumulated, unused, manual."""

import copy
import logging
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from composer_dist.distributed import clip_grad_norm, clip_grad_value, no_sync, parallelize_model
from composer_dist.distributed.replication import reducer
from composer_dist.distributed.replication.apply import ddp_sync_context
from composer_dist.distributed.replication.replica import replica_of
from composer_dist.errors import ParallelismRuntimeError, ParallelismValueError
from tests.kit.compare import alike, close, fails, fails_alike, same_parameters, values
from tests.kit.meshes import ddp, mine
from tests.kit.models import M
from tests.kit.toy import built
from tests.kit.world import on_ranks

pytestmark = pytest.mark.promise(104)


def inputs(steps: int) -> list[Tensor]:
    return [torch.randn(8, 8, generator=torch.Generator().manual_seed(step)) for step in range(steps)]


# Gradients


@pytest.mark.promise(118)
@on_ranks(2)
def test_a_step_that_one_rank_skips_is_an_error_in_one_of_the_next_backwards() -> None:
    model = M()
    optimizer = SGD(model.parameters(), 0.1)
    parallelize_model(model, ddp(), optimizer)
    for step, x in enumerate(inputs(3)):
        model(mine(x)).square().mean().backward()
        if (step, dist.get_rank()) != (2, 1):
            optimizer.step()
    with fails_alike(ParallelismRuntimeError, "stepped 3 times on rank 0, but 2 times on rank 1"):
        model(mine(x)).square().mean().backward()


@pytest.mark.promise(33)
@on_ranks(2)
def test_accumulation_and_clipping_equal_the_full_batch() -> None:
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


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}])
@on_ranks(2)
def test_steps_that_accumulate_from_the_first_on_with_a_static_graph(options: dict[str, Any]) -> None:
    """DDP counts what the first step gives to each parameter; so it does after a parameter is thawed."""
    torch.manual_seed(0)
    model = M()
    model[0].requires_grad_(False)
    single = copy.deepcopy(model)
    optimizers = [SGD(one.parameters(), 0.1) for one in (model, single)]
    parallelize_model(model, ddp(static_graph=True, **options), optimizers[0])
    for step, x in enumerate(inputs(6)):
        for one in (model, single):
            one[0].requires_grad_(step >= 3)
        for number, part in enumerate(mine(x).chunk(2)):
            with no_sync(model, enabled=number == 0):
                (model(part).square().mean() / 2).backward()
        single(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        close(values(model), values(single))
        assert alike(model)


@on_ranks(2)
def test_a_step_with_gradients_of_no_sync_alone_is_refused() -> None:
    """The replicas would differ from then on."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    parallelize_model(model, ddp())
    optimizer = SGD(model.parameters(), 0.1)
    for _ in range(2):
        with no_sync(model):
            model(mine(inputs(1)[0])).sum().backward()
    with fails(
        ParallelismRuntimeError, "gradients of weight, bias that are not averaged", "inside of no_sync"
    ):
        optimizer.step()
    model(mine(inputs(1)[0])).sum().backward()
    optimizer.step()
    for final in (False, True):
        with ddp_sync_context(model, final, "forced_sync"):
            model(mine(inputs(1)[0])).sum().backward()
    optimizer.step()
    assert alike(model)
    with no_sync(model):
        model(mine(inputs(1)[0])).sum().backward()
    model.bias.requires_grad_(False)  # so nobody averages what it has
    model(mine(inputs(1)[0])).sum().backward()
    with fails(ParallelismRuntimeError, "gradients of bias that are not averaged"):
        optimizer.step()
    model.bias.grad = None
    optimizer.step()
    assert alike(model)


@on_ranks(2)
def test_a_parameter_that_is_frozen_between_a_forward_and_its_backward_gets_no_gradient() -> None:
    """One of zero would move it, by momentum or weight decay."""
    model = nn.Linear(8, 4)
    parallelize_model(model, ddp())
    loss = model(inputs(1)[0]).sum()
    model.bias.requires_grad_(False)
    loss.backward()
    assert model.bias.grad is None
    assert model.weight.grad is not None


class Stepping(nn.Sequential):
    """Has a method of its own beside forward."""

    def training_step(self, x: Tensor) -> Tensor:
        return self(x).square().mean()


@pytest.mark.promise(35)
@pytest.mark.parametrize("static_graph", [False, True])
@on_ranks(2)
def test_forward_methods_average_as_forward_does(static_graph: bool) -> None:
    torch.manual_seed(0)
    model, single = Stepping(nn.Linear(8, 4)), nn.Linear(8, 4)
    single.load_state_dict(model[0].state_dict())
    parallelize_model(model, ddp(forward_methods=["training_step"], static_graph=static_graph))
    for x in inputs(2):
        model.training_step(mine(x)).backward()
        single(x).square().mean().backward()
        same_parameters(model[0], single, gradients=True)


class Branches(nn.Module):
    """Uses its second branch only where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor, both: bool = False) -> Tensor:
        out: Tensor = self.first(x)
        return out + self.second(x) if both else out


@pytest.mark.promise(64)
@on_ranks(2)
def test_unused_parameters_are_named() -> None:
    torch.manual_seed(0)
    model = Branches()
    parallelize_model(model, ddp())
    x = torch.randn(4, 8)
    model(x).sum().backward()
    for clip in (clip_grad_norm, clip_grad_value):
        with pytest.raises(ParallelismRuntimeError, match=rf"^{clip.__name__} would .* gave second.weight"):
            clip(model, 1.0)  # type: ignore[operator]
    with pytest.raises(RuntimeError, match=r"2 of 4.*find_unused_parameters=True") as caught:
        model(x)
    assert "second.weight, second.bias" in str(caught.value)
    assert type(caught.value.__cause__) is RuntimeError
    assert "Expected to have finished reduction in the prior iteration" in str(caught.value.__cause__)
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


@pytest.mark.promise(65)
@on_ranks(2)
def test_a_constant_graph_is_hinted_at_once_when_training_ends() -> None:
    hints: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: hints.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("composer_dist").addHandler(handler)
    for options, pattern, expected in (
        ({}, (True, True, True), 1),
        ({"find_unused_parameters": True}, (False, False, False), 1),
        ({"find_unused_parameters": True}, (False, True, False), 0),
        ({"static_graph": True}, (True, True, True), 0),
        ({}, (True,), 0),
    ):
        hints.clear()
        done = parallelize_model(built(Branches), ddp(**options))
        for both in pattern:
            done.model(torch.ones(4, 8), both).sum().backward()
        done.close()
        done.close()
        assert len(hints) == (expected if dist.get_rank() == 0 else 0), (options, pattern)
        assert all("static_graph=True" in hint for hint in hints)
    done = parallelize_model(built(Branches), ddp())
    for _ in range(3):
        done.model(torch.ones(4, 8), True).sum().backward()
    try:
        raise KeyError("of the user's")
    except KeyError:
        hints.clear()
        done.close()
    assert not hints
    logging.getLogger("composer_dist").removeHandler(handler)


def test_one_rank_is_not_hinted_at_what_would_save_averaging(caplog: pytest.LogCaptureFixture) -> None:
    done = parallelize_model(built(Branches), ddp())
    for _ in range(3):
        done.model(torch.ones(4, 8), True).sum().backward()
    done.close()
    assert "static_graph" not in caplog.text
    assert replica_of(done.model).could_be_static  # type: ignore[union-attr]


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
            self.checks.append(alike(self, lambda p: p.grad))
            if self.optimizer is not None:
                self.optimizer.step()
                self.optimizer.zero_grad()
            losses.append(loss)
        return torch.stack(losses)


@pytest.mark.promise(66)
@pytest.mark.parametrize("static_graph", [False, True])
@on_ranks(2)
def test_two_backwards_and_steps_inside_of_a_forward(static_graph: bool) -> None:
    torch.manual_seed(5)
    model = Manual()
    single = copy.deepcopy(model)
    single.optimizer, model.optimizer = SGD(single.parameters(), 0.5), SGD(model.parameters(), 0.5)
    parallelize_model(model, ddp(static_graph=static_graph), model.optimizer)
    for x in inputs(3):
        model(mine(x))
        single(x)
        close(values(model), values(single), rtol=1e-4)
    assert model.checks == [True] * 6


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


@on_ranks(2)
def test_outputs_of_any_kind_are_averaged_by_the_reducer() -> None:
    model = Opaque(8, 4)
    parallelize_model(model, ddp())
    for step in range(3):
        model.zero_grad()
        model(torch.randn(4, 8) * (dist.get_rank() + step)).loss.backward()
        assert alike(model, lambda p: p.grad)
    assert replica_of(model).could_be_static  # type: ignore[union-attr]  # the reducer has averaged


def two_losses(kind: str, between: bool = True, **options: Any) -> None:
    """Whether the gradients are averaged after the first of two backwards; after the second, they are."""
    torch.manual_seed(5)
    model = Heads(kind)
    single = copy.deepcopy(model)
    parallelize_model(model, ddp(**options))
    for x in inputs(3):
        model.zero_grad()
        single.zero_grad()
        first, second = model(mine(x))
        first.square().mean().backward(retain_graph=True)
        assert alike(model, lambda p: p.grad) == between
        second.square().mean().backward()
        assert alike(model, lambda p: p.grad)
        for output in single(x):
            output.square().mean().backward(retain_graph=True)
        same_parameters(model, single, gradients=True)


@pytest.mark.promise(66)
@pytest.mark.parametrize("static_graph", [False, True])
@pytest.mark.parametrize("kind", ["alike", "apart", "shared"])
@on_ranks(2)
def test_two_backwards_after_one_forward(kind: str, static_graph: bool) -> None:
    two_losses(kind, static_graph=static_graph, find_unused_parameters=not static_graph and kind != "alike")


@pytest.mark.promise(66)
@on_ranks(2)
def test_two_partial_backwards_are_refused_by_name_where_ddp_was_not_told() -> None:
    two_losses("apart", between=False)  # they become one average when all is there
    missing = "right.weight, right.bias no gradient (2 of 6"
    with fails(ParallelismRuntimeError, "A second backward began", missing):
        two_losses("shared", between=False)


class Drifts(nn.Linear):
    """Changes its weight by its input where it is evaluated."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.weight.data.add_(x.mean())
        return super().forward(x)


@on_ranks(2)
def test_an_evaluation_that_changes_parameters_is_refused() -> None:
    torch.manual_seed(0)
    model = Drifts(8, 4)
    parallelize_model(model, ddp())
    model(mine(inputs(1)[0])).sum().backward()
    model.eval()
    with torch.no_grad(), fails(ParallelismRuntimeError, "changed weight in place"):
        model(mine(inputs(1)[0]))


class Fails(torch.autograd.Function):
    """Backward raises while `now` is set."""

    now = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if Fails.now:
            raise MemoryError("no memory")
        return gradients


@pytest.mark.promise(66)
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
@on_ranks(2)
def test_training_goes_on_after_a_backward_that_raised_on_all_ranks(options: dict[str, Any]) -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    single = copy.deepcopy(model)
    model[1].register_forward_hook(lambda module, args, output: Fails.apply(output))
    parallelize_model(model, ddp(**options))
    for step, x in enumerate(inputs(4)):
        model.zero_grad()
        single.zero_grad()
        Fails.now = step == 1
        with pytest.raises(MemoryError) if Fails.now else nullcontext():
            model(mine(x)).square().mean().backward()
        if not Fails.now:
            single(x).square().mean().backward()
            same_parameters(model, single, gradients=True)


@on_ranks(2)
def test_a_rank_whose_backward_raises_alone_waits_for_the_others_for_a_limited_time() -> None:
    model = nn.Sequential(nn.Linear(8, 4))
    model[0].register_forward_hook(lambda module, args, output: Fails.apply(output))
    parallelize_model(model, ddp())
    x = mine(inputs(1)[0])
    for _ in range(2):  # in the second forward, DDP sends the order of its buckets
        model(x).mean().backward()
    if dist.get_rank() == 0:
        Fails.now = True
        with pytest.raises(MemoryError):
            model(x).mean().backward()
        limit = mock.patch.object(reducer, "_PATIENCE", timedelta(seconds=1))
        with limit, fails(ParallelismRuntimeError, "Rank 1 did not answer within 1 s at 'continuing"):
            model(x)
        Fails.now = False
    dist.barrier()


@on_ranks(2)
def test_a_second_backward_on_one_rank_alone_waits_for_the_others_for_a_limited_time() -> None:
    model = nn.Sequential(nn.Linear(8, 4))
    parallelize_model(model, ddp())
    loss = model(mine(inputs(1)[0])).mean()
    loss.backward(retain_graph=True)
    if dist.get_rank() == 0:
        limit = mock.patch.object(reducer, "_PATIENCE", timedelta(seconds=1))
        with limit, fails(ParallelismRuntimeError, "Rank 1 did not answer within", "at 'the end of a second"):
            loss.backward()
    dist.barrier()


@pytest.mark.promise(105)
@on_ranks(2)
def test_freezing_on_some_ranks_alone_is_an_error_before_gradients_are_averaged() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    parallelize_model(model, ddp())
    x, rank = mine(inputs(1)[0]), dist.get_rank()
    model(x).mean().backward()
    model[rank].weight.requires_grad_(False)
    with fails(ParallelismValueError, "Some ranks have frozen or thawed 0.weight, others 1.weight. Do the"):
        model(x)
    model[rank].weight.requires_grad_(True)
    model[0].weight.requires_grad_(rank == 1)
    if rank == 0:
        limit = mock.patch.object(reducer, "_PATIENCE", timedelta(seconds=1))
        with limit, fails(ParallelismRuntimeError, "Rank 1 did not answer", "changing which parameters"):
            model(x)
    dist.barrier()


@pytest.mark.promise(66)
@pytest.mark.parametrize(("options", "told"), [
    ({}, "The last backward gave 2.bias no gradient .1 of 4 parameters.*call backward once, for their sum"),
    ({"find_unused_parameters": True}, "The last backward gave 2.bias no gradient .1 of 4 parameters"),
    ({"static_graph": True}, "gave gradients to different parameters: 2.bias.*leave out static_graph"),
])  # fmt: skip
@on_ranks(2)
def test_a_penalty_with_a_backward_of_its_own_is_refused(options: dict[str, Any], told: str) -> None:
    """It does not depend on the last bias; in one backward with the loss it is averaged."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    single = copy.deepcopy(model)
    parallelize_model(model, ddp(**options))
    x = inputs(1)[0].requires_grad_()

    def penalty(model: nn.Module, x: Tensor) -> Tensor:
        return torch.autograd.grad(model(x).sum(), x, create_graph=True)[0].square().sum(1).mean()

    part = mine(x)

    def apart() -> None:
        penalty(model, part).backward()
        model(part).square().mean().backward()

    with pytest.raises(ParallelismRuntimeError, match=told):
        apart()
    if not options:
        model.zero_grad()
        replica_of(model).renew()  # type: ignore[union-attr]
        (penalty(model, part) + model(part).square().mean()).backward()
        (penalty(single, x) + single(x).square().mean()).backward()
        same_parameters(model, single, gradients=True)
