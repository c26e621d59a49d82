"""Optimizer groups and learning-rate schedules while phases come."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim import lr_scheduler as schedules

from composer_dist.errors import ParallelismValueError
from composer_dist.trainer.finetuning.groups import PhaseGroups

Named = dict[str, nn.Parameter]
A, B = ("a.weight", "a.bias"), ("b.weight", "b.bias")


@pytest.fixture
def named() -> Named:
    return {name: nn.Parameter(torch.randn(2)) for name in A + B}


def part(named: Named, names: tuple[str, ...]) -> Named:
    return {name: named[name] for name in names}


def withdrawn(
    optimizers: list[Optimizer],
    named: Named,
    schedulers: Sequence[Any] = (),
    no_decay: tuple[str, ...] = (),
    apply_lambdas: bool = False,
) -> PhaseGroups:
    groups = PhaseGroups(optimizers, list(schedulers), named, no_decay, apply_lambdas)
    groups.withdraw(named.values())
    return groups


def begun(
    optimizer: Optimizer, named: Named, lr: float | None = None, names: tuple[str, ...] = A, **options: Any
) -> PhaseGroups:
    """All are withdrawn; A comes with phase 0."""
    groups = withdrawn([optimizer], named, **options)
    groups.add(0, part(named, names), lr)
    return groups


def names_in(optimizer: Optimizer, named: Named) -> list[list[str]]:
    names = {parameter: name for name, parameter in named.items()}
    return [[names[p] for p in group["params"]] for group in optimizer.param_groups]


def step(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@pytest.mark.promise(72)
def test_an_optimizer_of_all_parameters_is_reduced_to_phase_0_and_grows(named: Named) -> None:
    optimizer = AdamW(named.values(), lr=0.1, betas=(0.8, 0.9), weight_decay=0.3)
    group = optimizer.param_groups[0]
    groups = begun(optimizer, named)
    assert names_in(optimizer, named) == [[*A]]
    assert optimizer.param_groups[0] is group
    step(optimizer)
    groups.add(1, part(named, B), 0.01)
    assert names_in(optimizer, named) == [[*A], [*B]]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.01]
    assert optimizer.param_groups[1]["betas"] == (0.8, 0.9)
    step(optimizer)


@pytest.mark.promise(72)
def test_replaying_a_phase_adds_nothing(named: Named) -> None:
    optimizer = SGD(named.values(), lr=0.1)
    groups = begun(optimizer, named, 0.2)
    for _ in range(2):
        groups.add(1, part(named, B), 0.01)
        groups.add(0, part(named, A), 0.3)
    assert names_in(optimizer, named) == [[*A], [*B]]
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.01]


@pytest.mark.promise(72)
def test_no_decay_makes_two_groups_unless_one_would_be_empty(named: Named) -> None:
    optimizer = AdamW(named.values(), lr=0.1, weight_decay=0.3)
    begun(optimizer, named, no_decay=("a.bias", "b.bias")).add(1, part(named, B), 0.01)
    assert names_in(optimizer, named) == [["a.weight"], ["a.bias"], ["b.weight"], ["b.bias"]]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.3, 0.0, 0.3, 0.0]
    assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.1, 0.01, 0.01]
    optimizer = AdamW(named.values(), lr=0.1, weight_decay=0.3)
    begun(optimizer, named, no_decay=B).add(1, part(named, B), 0.01)
    assert names_in(optimizer, named) == [[*A], [*B]]
    without = SGD(named.values(), lr=0.1)  # has no weight decay: one group does for both
    begun(without, named, no_decay=("a.bias",))
    assert names_in(without, named) == [[*A]]


def test_parameters_return_to_the_group_that_they_left(named: Named) -> None:
    pairs = [named["a.weight"], named["b.weight"]], [named["a.bias"], named["b.bias"]]
    optimizer = SGD([{"params": pair, "lr": lr} for pair, lr in zip(pairs, (0.1, 0.2), strict=True)])
    groups = begun(optimizer, named, names=("a.weight",))
    assert names_in(optimizer, named) == [["a.weight"], []]
    step(optimizer)
    groups.add(1, {"a.bias": named["a.bias"]}, None)
    groups.add(2, part(named, B), 0.01)
    assert names_in(optimizer, named) == [["a.weight"], ["a.bias"], ["b.weight"], ["b.bias"]]


@pytest.mark.parametrize("make", [SGD, Adam, AdamW, Adagrad])
@pytest.mark.parametrize("foreach", [False, True])
def test_optimizers_step_with_an_emptied_group(named: Named, make: Any, foreach: bool) -> None:
    optimizer = make([{"params": list(part(named, A).values())}, {"params": list(part(named, B).values())}])
    for group in optimizer.param_groups:
        group["foreach"] = foreach
    begun(optimizer, named, names=B)
    before = named["b.bias"].clone()
    step(optimizer)
    assert not torch.equal(before, named["b.bias"])
    assert optimizer.state_dict()["param_groups"][0]["params"] == []


def test_state_waits_with_its_parameters(named: Named) -> None:
    optimizer = Adagrad(named.values(), lr=0.1, initial_accumulator_value=0.5)  # makes state at once
    step(optimizer)
    held = optimizer.state[named["b.bias"]]["sum"]
    groups = withdrawn([optimizer], named)
    assert not optimizer.state
    groups.add(0, part(named, A), None)
    optimizer.state_dict()  # torch fails here where a parameter has state and no group
    groups.add(1, part(named, B), 0.01)
    assert optimizer.state[named["b.bias"]]["sum"] is held
    step(optimizer)


def test_named_groups_stay_named(named: Named) -> None:
    optimizer = SGD(list(named.items()), lr=0.1)
    begun(optimizer, named).add(1, part(named, B), 0.5)
    assert [group["param_names"] for group in optimizer.param_groups] == [[*A], [*B]]


def test_parameters_of_no_optimizer_join_the_only_one(named: Named) -> None:
    optimizer = SGD(part(named, A).values(), lr=0.1, momentum=0.9)
    groups = begun(optimizer, named, 0.3)
    groups.add(1, part(named, B), None)
    assert [(g["lr"], g["momentum"]) for g in optimizer.param_groups] == [(0.3, 0.9), (0.1, 0.9)]
    two = [SGD([named[name]], lr=0.1) for name in A]
    with pytest.raises(ParallelismValueError, match=r"b\.weight, b\.bias: in a phase, but in none of the 2"):
        withdrawn([*two], named)


def scheduled(named: Named, make: Any, **options: Any) -> tuple[Optimizer, Any, list[str]]:
    """Two steps of phase 0, then phase 1 with a rate of its own."""
    optimizer = SGD(named.values(), lr=1.0, momentum=0.9)
    scheduler = make(optimizer)
    groups = begun(optimizer, named, schedulers=[scheduler], **options)
    for _ in range(2):
        step(optimizer)
        scheduler.step()
    unmoved = groups.add(1, part(named, B), 0.1)
    return optimizer, scheduler, unmoved


def rates(optimizer: Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


@pytest.mark.promise(77)
@pytest.mark.parametrize(
    "make",
    [
        lambda o: schedules.StepLR(o, 3, 0.5),
        lambda o: schedules.ExponentialLR(o, 0.9),
        lambda o: schedules.CosineAnnealingLR(o, 10),
        lambda o: schedules.LinearLR(o, 0.5, total_iters=8),
        lambda o: schedules.OneCycleLR(o, max_lr=1.0, total_steps=10),
        lambda o: schedules.CyclicLR(o, base_lr=0.1, max_lr=1.0, step_size_up=4),
        lambda o: schedules.ChainedScheduler([schedules.StepLR(o, 3, 0.5), schedules.ExponentialLR(o, 0.9)]),
        lambda o: schedules.SequentialLR(
            o, [schedules.LinearLR(o, 0.5), schedules.CosineAnnealingLR(o, 10)], [3]
        ),
    ],
)
def test_schedulers_learn_of_new_groups(named: Named, make: Any) -> None:
    optimizer, scheduler, unmoved = scheduled(named, make)
    assert not unmoved
    assert rates(optimizer)[1] == 0.1
    for _ in range(3):
        step(optimizer)
        scheduler.step()
    assert len(scheduler.get_last_lr()) == 2
    assert rates(optimizer)[1] != 0.1
    inner = getattr(scheduler, "_schedulers", [scheduler])
    assert all(len(one.base_lrs) == 2 and one.base_lrs[1] == 0.1 for one in inner)


@pytest.mark.promise(77)
def test_base_rates_are_extended_and_move_in_step(named: Named) -> None:
    optimizer, scheduler, _ = scheduled(named, lambda o: schedules.StepLR(o, 3, 0.5))
    assert scheduler.base_lrs == [1.0, 0.1]
    scheduler.step()
    assert rates(optimizer) == [0.5, 0.05]


@pytest.mark.promise(77)
def test_functions_of_time_leave_new_groups_alone_unless_asked(named: Named) -> None:
    def halves(optimizer: Optimizer) -> Any:
        return schedules.LambdaLR(optimizer, lambda count: 0.5**count)

    optimizer, scheduler, unmoved = scheduled(named, halves)
    assert unmoved == ["LambdaLR"]
    scheduler.step()
    assert rates(optimizer) == [0.125, 0.1]
    again = {name: nn.Parameter(torch.randn(2)) for name in named}
    optimizer, scheduler, unmoved = scheduled(again, halves, apply_lambdas=True)
    assert not unmoved
    assert rates(optimizer) == [0.25, 0.025]  # as if it had followed from the start
    scheduler.step()
    assert rates(optimizer) == [0.125, 0.0125]


@pytest.mark.promise(77)
def test_phase_0_keeps_its_schedule_and_starts_from_its_own_rate(named: Named) -> None:
    optimizer = SGD(named.values(), lr=1.0)
    scheduler = schedules.LambdaLR(optimizer, lambda count: (count + 1) / 4)  # a warm-up
    groups = withdrawn([optimizer], named, [scheduler])
    assert groups.add(0, part(named, A), 0.2) == []
    assert rates(optimizer) == [pytest.approx(0.05)]
    step(optimizer)
    scheduler.step()
    assert rates(optimizer) == [pytest.approx(0.1)]


@pytest.mark.promise(77)
def test_two_optimizers_have_their_own_schedulers(named: Named) -> None:
    one, two = SGD(part(named, A).values(), lr=1.0), SGD(part(named, B).values(), lr=2.0)
    pair = [schedules.ExponentialLR(one, 0.5), schedules.ExponentialLR(two, 0.5)]
    groups = withdrawn([one, two], named, pair)
    groups.add(0, part(named, A), None)
    groups.add(1, part(named, B), 0.1)
    assert [len(o.param_groups) for o in (one, two)] == [1, 2]
    assert [scheduler.base_lrs for scheduler in pair] == [[1.0], [2.0, 0.1]]
