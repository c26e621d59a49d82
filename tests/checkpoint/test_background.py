"""Saving in the background."""

import os
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from composer_dist.checkpoint import load_checkpoint, save_checkpoint
from composer_dist.errors import CheckpointRuntimeError
from composer_dist.files import checked as checked_file
from tests.kit.runs import assert_same, load_run, snapshot, start, train
from tests.kit.toy import stateful
from tests.kit.world import World


def train_meanwhile(path: str, sharded: bool) -> tuple[Any, bool]:
    held = threading.Event()
    write = checked_file.LocalSink.write

    def slow(self: Any, data: Any) -> None:
        held.wait(30)
        write(self, data)

    with patch.object(checked_file.LocalSink, "write", slow):
        model, optimizer = start("fsdp2", stateful, 0)
        train(model, optimizer)
        before = snapshot(model, optimizer)
        state = {"model": model, "optimizer": optimizer, "steps": 1}
        pending = save_checkpoint(path, state, asynchronous=True, sharded=sharded)
        assert pending is not None
        train(model, optimizer, 3)
        under_way = not pending.done
        pending.check()
        held.set()
        pending.wait()
        assert pending.done
        return before, under_way


@pytest.mark.parametrize("sharded", [True, False])
def test_training_goes_on(world2: World, tmp_path: Path, sharded: bool) -> None:
    path = str(tmp_path / "c")
    (before, under_way), _ = world2(train_meanwhile, path, sharded)
    assert under_way
    assert_same(world2(load_run, path, "fsdp2")[0], before)


def save_thrice(directory: str) -> list[str]:
    model, optimizer = start("fsdp2", stateful, 0)
    found = []
    for number in range(3):
        train(model, optimizer)
        pending = save_checkpoint(f"{directory}/{number}", {"model": model}, asynchronous=True)
        assert pending is not None
        found.append(",".join(sorted(os.listdir(directory))) if number == 2 and dist.get_rank() == 0 else "")
    load_checkpoint(f"{directory}/2", {"model": model})
    return found


def test_at_most_one_is_under_way(world2: World, tmp_path: Path) -> None:
    found = world2(save_thrice, str(tmp_path))[0][-1].split(",")
    assert {"0", "1"} <= set(found), "the third began when the first two were complete"
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "2"]


def fail_on_one_rank(path: str) -> tuple[str, str]:
    model, _ = start("fsdp2", stateful, 0)

    def write(self: Any, data: Any) -> None:
        if dist.get_rank() == 1:
            raise OSError(28, "No space left on device")

    with patch.object(checked_file.LocalSink, "write", write):
        save_checkpoint(path, {"model": model}, asynchronous=True)
        with pytest.raises(CheckpointRuntimeError) as caught:
            save_checkpoint(path, {"model": model}, asynchronous=True)
        pending = save_checkpoint(path, {"model": model}, asynchronous=True)
        assert pending is not None
        with pytest.raises(CheckpointRuntimeError) as again:
            pending.wait()
        pending.wait()
    return str(caught.value), str(again.value)


def test_errors_surface_at_the_next_save_on_all_ranks(world2: World, tmp_path: Path) -> None:
    first, second = world2(fail_on_one_rank, str(tmp_path / "c"))
    assert first == second
    assert all("No space left" in text and "Rank 1" in text for text in first)
    assert os.listdir(tmp_path) == []


def test_the_buffers_are_used_again(world2: World, tmp_path: Path) -> None:
    world2(count_buffers, str(tmp_path / "c"))


def count_buffers(path: str) -> None:
    from composer_dist.checkpoint.background import _buffers

    model, _ = start("fsdp2", stateful, 0)
    places = []
    for _ in range(2):
        pending = save_checkpoint(path, {"model": model}, asynchronous=True)
        assert pending is not None
        pending.wait()
        places.append(sorted(tensor.data_ptr() for tensor in _buffers._held.values()))
    assert places[0] == places[1] != []
