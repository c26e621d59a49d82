"""no_sync, against one process on the full batch."""

import contextlib

import pytest
import torch
from torch import nn

from composer_dist.distributed.training.gradients import no_sync
from tests.kit.gradients import Toy, assert_grads, batch, collectives, flags, loss_of, prepared, reference
from tests.kit.meshes import mine
from tests.kit.world import on_ranks

pytestmark = pytest.mark.promise(33)
KINDS = ["fsdp", "hsdp", "ddp", "replicate"]


@pytest.mark.parametrize(("kind", "ranks"), [*((kind, 2) for kind in KINDS), ("hsdp", 4)])
@on_ranks("ranks")
def test_accumulation_without_communication_equals_the_full_batch(kind: str, ranks: int) -> None:
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


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_enabled_false_synchronizes_and_leaves_sync_on(kind: str) -> None:
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


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_restores_each_modules_own_state(kind: str) -> None:
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


def test_does_nothing_to_a_model_of_one_process() -> None:
    model = Toy()
    with no_sync(model):
        loss_of(model(batch()[0])).backward()
    assert model.head.weight.grad is not None


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_modules_of_torch_jit_are_passed_over() -> None:
    """A traced module keeps its children in another place."""
    model = nn.Sequential(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)))
    with no_sync(model):
        model(torch.ones(1, 2)).sum().backward()
    assert all(one.grad is not None for one in model.parameters())
