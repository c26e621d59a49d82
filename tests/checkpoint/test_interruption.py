"""A save when the program ends, or is interrupted, meanwhile: completed, or as if it had not begun."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composer_dist.checkpoint import background as async_save
from composer_dist.checkpoint import load_checkpoint, save_checkpoint
from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.distributed import parallelize_model
from composer_dist.errors import ParallelismError
from composer_dist.files import checked as checked_file
from tests.kit.grids import crossed
from tests.kit.toy import stateful
from tests.kit.world import PRELOAD, on_ranks

ROOT = Path(__file__).parents[2]
ENDS: dict[str, list[bool]] = {
    "both end": [True, True],
    "one raises": [True, True],
    "the group is destroyed first": [True, True],
    "Ctrl-C while both wait": [True, True],
    "Ctrl-C while one waits": [False, True],
    "Ctrl-C twice": [False, True],
    "one is killed": [False, True],
}
"""What happens while a save is under way, and on which ranks writing waits for the end of the program."""


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def held_back(rank: int, how: str) -> Callable[[Any, Any], None]:
    """Writes as usual, but for those of the thread: they wait for what is to happen before them."""
    write, held = checked_file.LocalSink.write, [ENDS[how][rank]]

    def late(self: Any, data: Any) -> None:
        main = threading.main_thread()
        if threading.current_thread() is not main and held and held.pop():
            assert main.ident is not None
            if how == "one is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how.startswith("Ctrl-C"):
                signal.pthread_kill(main.ident, signal.SIGINT)
            main.join()  # it has ended when the interpreter begins to wait for the other threads
            if how == "Ctrl-C twice":
                signal.pthread_kill(main.ident, signal.SIGINT)
        write(self, data)

    return late


def program(rank: int, port: int, directory: str, how: str) -> None:
    """One rank of a run that saves in the background, and whose end does not wait for it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model = stateful()
    parallelize_model(model, FSDP2Config())
    fill(model, 1)
    save_checkpoint(f"{directory}/before", {"model": model})
    fill(model, 2)
    checked_file.LocalSink.write = held_back(rank, how)  # type: ignore[method-assign]
    pending = save_checkpoint(f"{directory}/after", {"model": model}, asynchronous=True)
    assert pending is not None
    fill(model, 3)
    if how == "the group is destroyed first":
        dist.destroy_process_group()
    elif how == "one raises" and rank == 1:
        raise RuntimeError("the end")
    elif how not in ("both end", "one raises"):
        pending.wait()


def forked(*arguments: Any) -> list[int | None]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    ranks = [context.Process(target=program, args=(rank, *arguments)) for rank in range(2)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(60)
        one.kill()
        one.join()
    return [one.exitcode for one in ranks]


def started(*arguments: Any) -> list[int | None]:
    call = "import sys; from tests.checkpoint.test_interruption import program; r, p, d, h = sys.argv[1:]"
    call += "; program(int(r), int(p), d, h)"
    command = [sys.executable, "-c", call]
    ranks = [subprocess.Popen([*command, str(r), *map(str, arguments)], cwd=ROOT) for r in range(2)]
    return [one.wait(120) for one in ranks]


def values(path: Path) -> set[float]:
    """The values of the parameters in a checkpoint; it has to be whole."""
    model = stateful()
    load_checkpoint(path, {"model": model})
    return {value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()}


@pytest.mark.parametrize(
    ("run", "how"),
    [
        *((forked, how) for how in ("both end", "Ctrl-C while one waits")),
        *(pytest.param(started, how, marks=pytest.mark.slow) for how in ENDS),
    ],
)
def test_the_end_of_the_program_leaves_no_torn_checkpoint(
    tmp_path: Path, run: Callable[..., list[int | None]], how: str
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second = run(store.port, str(tmp_path), how)
    assert values(tmp_path / "before") == {1}
    left = {path.name for path in tmp_path.iterdir()}
    if how == "one is killed":
        assert second == -signal.SIGKILL
        assert first == 1, "the other one raises, and cleans up"
        assert left == {"before"}
    elif how == "Ctrl-C twice":  # it goes down at once; the save is complete or abandoned
        assert second != 0
        assert "after" not in left or values(tmp_path / "after") == {2}
    else:
        assert left == {"before", "after"}
        assert values(tmp_path / "after") == {2}
        assert (first == 0) == (how != "Ctrl-C while both wait")
        assert (second == 0) == (how in ("both end", "the group is destroyed first"))


@crossed({"ranks": [[0], [1], [0, 1]], "where, asynchronous": [("copying", True), ("writing", False)]})
@on_ranks(2)
def test_ctrl_c_within_the_call_abandons_the_save_everywhere(
    tmp_path: Path, where: str, asynchronous: bool, ranks: list[int]
) -> None:
    model, path, interrupted = stateful(), tmp_path / "c", dist.get_rank() in ranks
    parallelize_model(model, FSDP2Config())
    save_checkpoint(path, {"model": model})
    place = {"copying": (async_save.Buffers, "copy"), "writing": (checked_file.LocalSink, "write")}[where]
    usual = getattr(*place)

    def stopped(*arguments: Any) -> Any:
        if interrupted:
            raise KeyboardInterrupt
        return usual(*arguments)

    expected: Any = (KeyboardInterrupt, ParallelismError) if interrupted else ParallelismError
    text = None if interrupted else "KeyboardInterrupt"
    with patch.object(*place, stopped), pytest.raises(expected, match=text):
        save_checkpoint(path, {"model": model}, asynchronous=asynchronous)
    dist.barrier()
    assert values(path) != {5}
    fill(model, 5)
    pending = save_checkpoint(path, {"model": model}, asynchronous=asynchronous)
    if pending is not None:
        pending.wait()
    assert values(path) == {5}
    assert os.listdir(tmp_path) == ["c"]
