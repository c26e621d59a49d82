"""A rank that waits for one that has failed raises what that one reported."""

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from composer_dist import MeshConfig, ParallelismConfig, TPConfig
from composer_dist.distributed import clip_grad_norm, parallelize_model, process_group
from composer_dist.distributed.ranks.failures import is_lost
from composer_dist.distributed.ranks.reports import told_to_all
from composer_dist.distributed.training.average_gradients import average_gradients
from composer_dist.errors import ParallelismError, ParallelismRuntimeError, ParallelismValueError
from tests.kit.compare import fails
from tests.kit.training import joined, quiet, recovers, tagged, tagger
from tests.kit.world import WorkerError, World

pytestmark = pytest.mark.promise(108)


def fails_elsewhere(error: Exception, kind: type[ParallelismError], **options: Any) -> str:
    """Rank 1 trains a while, then its loss raises; it leaves as a process does that nobody catches."""
    model = tagger()
    data = [joined(tagged(3))] * 4
    trainer, _ = quiet(model, train_dataloader=data, parallelism_config="fsdp", **options)
    trainer.fit(duration="2ba")
    if dist.get_rank() == 1:
        model.loss = mock.Mock(side_effect=error)  # type: ignore[method-assign]
        with fails(type(error), str(error)):
            trainer.fit(duration="1ba")
        os._exit(1)
    with pytest.raises(kind) as caught:
        trainer.fit(duration="1ba")
    return str(caught.value)


@pytest.mark.parametrize(
    ("error", "kind", "options", "text"),
    [
        (ValueError("a label of 17"), ParallelismValueError, {}, "ValueError: a label of 17"),
        pytest.param(
            torch.OutOfMemoryError("CUDA out of memory (injected)"),
            ParallelismRuntimeError,
            {"device_train_microbatch_size": "auto"},  # settled by then
            "OutOfMemoryError: CUDA out of memory (injected)",
            marks=[recovers, pytest.mark.promise(99)],
        ),
    ],
)
def test_the_others_say_what_the_first_one_said(
    world2: World, error: Exception, kind: type, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(WorkerError) as caught:
        world2(fails_elsewhere, error, kind, **options)
    assert caught.value.results == {0: f"Rank 1: {text} (at 'the loss of batch 3')"}


def test_alone_an_error_is_itself() -> None:
    with pytest.raises(KeyError) as caught, told_to_all(lambda: "the loss of batch 2"):
        raise KeyError("x")
    assert caught.value.__notes__ == ["This was the loss of batch 2."]


def test_only_messages_of_libraries_say_that_a_rank_was_lost() -> None:
    closed = "[/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:3"
    assert is_lost(RuntimeError(closed))
    assert not is_lost(RuntimeError("Connection to the database failed, see gloomy.log"))


def end_rank_1() -> None:
    """The process of rank 1 exits with status 0, once rank 0 is here too."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.set("here", b"")
    else:
        store.wait(["here"])
        os._exit(0)


def ends_without_a_word(event: str) -> str:
    """Rank 1 trains a while, and then its process ends in the middle of a batch."""
    trainer, _ = quiet(
        tagger(), train_dataloader=[joined(tagged(3))] * 4, parallelism_config="fsdp", gradient_clipping=1.0
    )
    trainer.fit(duration="2ba")
    setattr(trainer.callbacks[0], event, lambda state, logger: end_rank_1())
    with pytest.raises(ParallelismRuntimeError) as caught:
        trainer.fit(duration="1ba")
    return str(caught.value)


@pytest.mark.parametrize(
    ("event", "where"),
    [
        ("before_dataloader", "the data"),
        ("before_backward", "the backward"),
        ("after_train_batch", "clipping and the optimizer step"),
    ],
)
def test_a_rank_that_ends_without_a_word_is_named_with_the_step(
    world2: World, event: str, where: str
) -> None:
    with pytest.raises(WorkerError) as caught:
        world2(ends_without_a_word, event)
    assert caught.value.results == {
        0: f"Rank 1 ended while rank 0 was at '{where} of batch 3'; see the output there."
    }


def loop_without_rank_1() -> list[str]:
    """A plain loop: rank 1 ends, and rank 0 calls our functions."""
    model = torch.nn.Linear(4, 4)
    replicas = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)
    for one, mode in ((model, "fsdp"), *((replica, "ddp") for replica in replicas)):
        parallelize_model(one, mode)
        one(torch.ones(2, 4)).sum().backward()
    cut = torch.nn.Sequential(torch.nn.Linear(4, 4))
    parallelize_model(
        cut, ParallelismConfig(mesh=MeshConfig(tp=2), tp=TPConfig(plan={"0": "colwise_gather"}))
    )
    losses = [one(torch.ones(2, 4, requires_grad=True)).sum() for one in (replicas[0], cut)]
    new = torch.nn.Linear(4, 4)
    parallelize_model(new, "ddp")
    end_rank_1()
    calls: list[Callable[[], Any]] = [
        lambda: model(torch.ones(2, 4)),
        losses[0].backward,
        lambda: replicas[1](torch.ones(2, 4)),
        lambda: new(torch.ones(2, 4)),
        lambda: clip_grad_norm(model, 1.0),
        lambda: average_gradients([torch.nn.Parameter(torch.ones(1))]),
        lambda: process_group.all_reduce(torch.ones(1)),
        lambda: process_group.gather_objects("mine"),
        lambda: process_group.broadcast("mine", src=1),
        process_group.barrier,
        losses[1].backward,
        lambda: cut(torch.ones(2, 4)),
    ]
    texts = []
    for call in calls:
        with pytest.raises(ParallelismRuntimeError) as caught:
            call()
        texts.append(str(caught.value))
    return texts


def test_in_a_plain_loop_a_rank_that_ends_is_named_with_the_function(world2: World) -> None:
    with pytest.raises(WorkerError) as caught:
        world2(loop_without_rank_1)
    names = ["gather the root", "a DDP backward", "a DDP forward", "a DDP forward", "clip_grad_norm"]
    names += ["average_gradients", "all_reduce", "gather_objects", "broadcast", "barrier"]
    names += ["a collective of tensor parallelism"]
    texts = [f"Rank 1 ended while rank 0 was at '{name}'; see the output there." for name in names]
    texts += ["Rank 1 died at 'a forward of tensor parallelism'; see the output there."]
    assert caught.value.results == {0: texts}, caught.value
