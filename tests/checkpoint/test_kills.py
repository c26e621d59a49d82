"""A SIGKILL at any call of a save leaves the newest complete checkpoint loadable."""

import multiprocessing
import os
import shutil
import signal
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from composer_dist.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from composer_dist.checkpoint.storage.place import place_of, point, remove_older
from tests.kit.killing import Killing
from tests.kit.toy import stateful
from tests.kit.world import PRELOAD


def save(path: Path, number: int, sharded: bool = True, keep: int | None = None) -> None:
    model: nn.Module = stateful()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(number)
    pending = save_checkpoint(
        path, {"model": model, "number": number}, sharded=sharded, keep=keep, asynchronous=number == 3
    )
    if pending is not None:
        pending.wait()


def kept(folder: Path) -> None:
    save(folder / "b", 2, keep=1)


def pointed(folder: Path) -> None:
    save(folder / "b", 3)
    point(str(folder), "latest", "b")
    remove_older(place_of(folder / "b"), 1)


SAVES: dict[str, tuple[bool, Callable[[Path], None]]] = {
    "beside, then removed": (True, kept),
    "as the CheckpointSaver does": (True, pointed),
    "file beside, then removed": (False, kept),
    "directory over directory": (True, lambda folder: save(folder / "a", 2)),
    "file over file": (False, lambda folder: save(folder / "a", 2, sharded=False)),
    "file over directory": (True, lambda folder: save(folder / "a", 2, sharded=False)),
    "directory over file": (False, lambda folder: save(folder / "a", 2)),
}
"""Whether the checkpoint `a` that exists is a directory, and the save that is killed."""


def newest(folder: Path) -> int:
    """The number of the newest checkpoint; it has to be whole."""
    path = latest_checkpoint(folder)
    assert path is not None
    model: nn.Module = stateful()
    state = {"model": model, "number": 0}
    load_checkpoint(path, state)
    number = state["number"]
    assert isinstance(number, int)
    assert {value for one in model.parameters() for value in one.detach().flatten().tolist()} == {number}
    if (folder / "latest").is_symlink():
        assert load_checkpoint(folder / "latest")["number"] in (1, number)
    return number


def killed(doing: Callable[[Path], None], folder: Path, at: int) -> bool:
    """Whether a save ended at its call number `at`, and not before by itself."""
    child = os.fork()
    if child == 0:
        try:
            Killing(at)
            doing(folder)
        finally:
            os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL)
    return status == signal.SIGKILL


def sweep(folder: Path, name: str, every: int) -> None:
    """Kill a save at each call, or at some; look at what is left, and save again."""
    warnings.simplefilter("error")
    sharded, doing = SAVES[name]
    at, found = 0, [1]
    while True:
        here = folder / str(at)
        save(here / "a", 1, sharded)
        if doing is pointed:
            point(str(here), "latest", "a")
        ended = killed(doing, here, at)
        found.append(newest(here))
        assert found[-1] >= found[-2], "what is complete stays so"
        doing(here)
        assert newest(here) > 1
        left = {"b", "latest"} if doing is pointed else {"b"} if doing is kept else {"a"}
        assert {path.name for path in here.iterdir()} == left, (at, list(here.iterdir()))
        shutil.rmtree(here)
        if not ended:
            break
        at += every
    assert at > 16
    assert found[1] == 1
    assert found[-1] > 1
    print(f"{name}: {len(found) - 2} of {at} calls")


@pytest.mark.promise(59)
@pytest.mark.parametrize("every", [37, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SAVES)
def test_the_newest_complete_checkpoint_survives(tmp_path: Path, name: str, every: int) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=sweep, args=(tmp_path, name, every))
    process.start()
    process.join()
    assert process.exitcode == 0, "see its output"
