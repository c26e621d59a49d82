"""no_sync, against one process on the full batch."""

import contextlib

import pytest

from composer_dist.distributed.training.gradients import no_sync
from tests.kit.gradients import (
    Toy,
    assert_grads,
    batch,
    collectives,
    flags,
    loss_of,
    mine,
    prepared,
    reference,
)
from tests.kit.world import World


def accumulate(kind: str) -> None:
    model, single = prepared(kind)
    batches = batch(3)
    expected = reference(single, batches)
    with no_sync(model):
        for x in batches[:2]:
            with collectives() as calls:
                loss_of(model(mine(x))).backward()
            assert calls == []
    loss_of(model(mine(batches[2]))).backward()
    assert_grads(model, expected)


@pytest.mark.promise(33)
@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "ddp", "replicate"])
def test_accumulation_without_communication_equals_the_full_batch(world2: World, kind: str) -> None:
    world2(accumulate, kind)


@pytest.mark.promise(33)
def test_accumulation_on_a_two_by_two_mesh(world4: World) -> None:
    world4(accumulate, "hsdp")


def sync_forced(kind: str) -> None:
    model, single = prepared(kind)
    batches = batch(2)
    before = flags(model)
    with no_sync(model, enabled=False):
        loss_of(model(mine(batches[0]))).backward()
    assert_grads(model, reference(single, batches[:1]))
    assert flags(model) == before
    loss_of(model(mine(batches[1]))).backward()  # outside: still synchronized
    assert_grads(model, reference(single, batches[1:]))
    model.zero_grad()
    single.zero_grad()
    with no_sync(model), no_sync(model, enabled=False):
        loss_of(model(mine(batches[0]))).backward()
    assert_grads(model, reference(single, batches[:1]))


@pytest.mark.promise(33)
@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "ddp", "replicate"])
def test_enabled_false_synchronizes_and_leaves_sync_on(world2: World, kind: str) -> None:
    world2(sync_forced, kind)


def nested_and_interrupted(kind: str) -> None:
    model, _ = prepared(kind)
    if kind in {"fsdp", "hsdp"}:
        model.blocks[0].set_requires_gradient_sync(False)  # a state of the user's own
    else:
        model(batch()[0])  # composable replicate makes its reducer in the first forward
    before = flags(model)
    with no_sync(model, enabled=False):
        synchronized = flags(model)
    assert flags(model) == before
    with no_sync(model):
        off = flags(model)
        with no_sync(model, enabled=False):
            assert flags(model) == synchronized
        assert flags(model) == off
        with contextlib.suppress(ZeroDivisionError), no_sync(model, enabled=False):
            raise ZeroDivisionError
        assert flags(model) == off
    assert flags(model) == before


@pytest.mark.promise(33)
@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "ddp", "replicate"])
def test_restores_each_modules_own_state(world2: World, kind: str) -> None:
    world2(nested_and_interrupted, kind)


@pytest.mark.promise(33)
def test_does_nothing_to_a_model_of_one_process() -> None:
    model = Toy()
    with no_sync(model):
        loss_of(model(batch()[0])).backward()
    assert model.head.weight.grad is not None
