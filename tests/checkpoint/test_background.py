"""Saving in the background."""

import os
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from composer_dist.checkpoint import background as async_save
from composer_dist.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from composer_dist.errors import CheckpointRuntimeError
from composer_dist.files import checked as checked_file
from tests.kit.compare import fails_alike
from tests.kit.runs import assert_same, load_run, snapshot, start, train
from tests.kit.toy import stateful
from tests.kit.world import on_ranks


@pytest.mark.promise(51)
@pytest.mark.parametrize("sharded", [True, False])
@on_ranks(2)
def test_training_goes_on(tmp_path: Path, sharded: bool) -> None:
    path, held, write = str(tmp_path / "c"), threading.Event(), checked_file.LocalSink.write

    def slow(self: Any, data: Any) -> None:
        held.wait(30)
        write(self, data)

    with patch.object(checked_file.LocalSink, "write", slow):
        model, optimizer = start("fsdp2", stateful, 0)
        train(model, optimizer)
        before = snapshot(model, optimizer)
        state = {"model": model, "optimizer": optimizer, "steps": 1}
        pending = save_checkpoint(path, state, asynchronous=True, sharded=sharded)
        train(model, optimizer, 3)
        assert dist.get_rank() or not pending.done
        pending.check()
        assert torch.serialization.get_crc32_options(), "torch's own saves are not changed meanwhile"
        held.set()
        pending.wait()
        assert pending.done
    assert_same(load_run(path, "fsdp2"), before)


@on_ranks(2)
def test_at_most_one_is_under_way(tmp_path: Path) -> None:
    model, optimizer = start("fsdp2", stateful, 0)
    for number in range(3):
        train(model, optimizer)
        assert save_checkpoint(tmp_path / str(number), {"model": model}, asynchronous=True) is not None
    if dist.get_rank() == 0:
        assert {"0", "1"} <= set(os.listdir(tmp_path)), "the third began when the first two were complete"
    load_checkpoint(tmp_path / "2", {"model": model})
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "2"]


@on_ranks(2)
def test_errors_surface_at_the_next_save_on_all_ranks(tmp_path: Path) -> None:
    state = {"model": start("fsdp2", stateful, 0)[0]}

    def write(self: Any, data: Any) -> None:
        if dist.get_rank() == 1:
            raise OSError(28, "No space left on device")

    with patch.object(checked_file.LocalSink, "write", write):
        first = save_checkpoint(tmp_path / "c", state, asynchronous=True)
        with fails_alike(CheckpointRuntimeError, "No space left", "Rank 1"):
            save_checkpoint(tmp_path / "c", state, asynchronous=True)
        second = save_checkpoint(tmp_path / "c", state, asynchronous=True)
        for ask in (second.wait, second.check, first.wait, first.check):
            with fails_alike(CheckpointRuntimeError, "No space left", "Rank 1"):
                ask()
        assert latest_checkpoint(tmp_path) is None, "the error of a save is raised at one other call"
    assert os.listdir(tmp_path) == []


@on_ranks(2)
def test_the_buffers_are_used_again(tmp_path: Path) -> None:
    state, places = {"model": start("fsdp2", stateful, 0)[0]}, []
    for _ in range(2):
        pending = save_checkpoint(tmp_path / "c", state, asynchronous=True)
        pending.wait()
        places.append(sorted(tensor.data_ptr() for tensor in async_save._buffers._held.values()))
    assert places[0] == places[1] != []
