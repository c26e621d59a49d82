"""A rank that waits for one that has failed raises what that one reported."""

import os

import pytest
import torch
import torch.distributed as dist

from composer_dist.distributed.ranks.reports import told_to_all
from composer_dist.errors import ParallelismRuntimeError, ParallelismValueError
from tests.kit.training import joined, quiet, tagged, tagger
from tests.kit.world import WorkerError, World


def fails_elsewhere() -> str:
    """Rank 1 trains a while, then its loss raises; it leaves as a process does that nobody catches."""
    model = tagger()
    trainer, _ = quiet(model, train_dataloader=[joined(tagged(3))] * 4, parallelism_config="fsdp")
    trainer.fit(duration="1ba")
    if dist.get_rank() == 1:
        model.loss = _raise  # type: ignore[method-assign]
        with pytest.raises(ValueError, match="a label of 17"):
            trainer.fit(duration="1ba")
        os._exit(1)
    with pytest.raises(ParallelismValueError) as caught:
        trainer.fit(duration="1ba")
    return str(caught.value)


def _raise(outputs: object, batch: object) -> torch.Tensor:
    raise ValueError("a label of 17")


def test_the_others_say_what_the_first_one_said(world2: World) -> None:
    with pytest.raises(WorkerError) as caught:
        world2(fails_elsewhere)
    assert caught.value.results == {0: "Rank 1: ValueError: a label of 17"}


def out_of_memory_once_settled() -> str:
    model = tagger()
    trainer, _ = quiet(
        model,
        train_dataloader=[joined(tagged(3))] * 4,
        parallelism_config="fsdp",
        device_train_microbatch_size="auto",
    )
    trainer.fit(duration="2ba")
    if dist.get_rank() == 1:
        model.loss = _out_of_memory  # type: ignore[method-assign]
        with pytest.raises(torch.OutOfMemoryError):
            trainer.fit(duration="1ba")
        os._exit(1)
    with pytest.raises(ParallelismRuntimeError) as caught:
        trainer.fit(duration="1ba")
    return str(caught.value)


def _out_of_memory(outputs: object, batch: object) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory (injected)")


@pytest.mark.promise(99)
def test_once_the_size_is_settled_running_out_of_memory_raises_on_all_ranks(world2: World) -> None:
    with pytest.raises(WorkerError) as caught:
        world2(out_of_memory_once_settled)
    assert caught.value.results == {0: "Rank 1: OutOfMemoryError: CUDA out of memory (injected)"}


def test_alone_an_error_is_itself() -> None:
    with pytest.raises(KeyError), told_to_all():
        raise KeyError("x")
