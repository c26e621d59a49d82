"""Processes that a program starts itself."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from composer_dist.distributed import launch
from composer_dist.distributed.ranks import launch as launching
from composer_dist.distributed.ranks import process_group
from composer_dist.errors import ParallelismRuntimeError, ParallelismValueError
from tests.kit.grids import slow

pytestmark = pytest.mark.promise(68)


def _sum(start: int, *, scale: int = 1) -> tuple[int, int, torch.Tensor]:
    process_group.init()
    world, rank = process_group.world_and_rank()
    return rank, world, process_group.all_reduce(torch.tensor([start + rank]) * scale, "sum")


class OwnError(Exception):
    pass


def _fail(bad: int, error: BaseException | None = None) -> None:
    process_group.init()
    if process_group.world_and_rank()[1] == bad:
        if error is not None:
            raise error
        raise OwnError(f"no data for {bad}")
    process_group.barrier()


def _die() -> None:
    os._exit(7)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", slow("spawn")])
def test_every_method_returns_rank_0_s_value(method: str) -> None:
    rank, world, total = launch(_sum, 2, method, (10,), {"scale": 2})
    assert (rank, world) == (0, 2)
    assert total.tolist() == [2 * (10 + 11)]
    assert not process_group.is_distributed()


@pytest.mark.slow
def test_forked_ranks_leave_the_groups_of_their_parent_alone() -> None:
    """Freeing them ends the rank with SIGABRT, or never ends."""
    command = [sys.executable, "-m", "tests.kit.scripts.forking"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (found.returncode, found.stdout.strip()) == (0, "2"), found.stderr


def test_what_is_no_method_lists_those_that_are() -> None:
    with pytest.raises(ParallelismValueError, match="one of spawn, fork, not 'thread'"):
        launch(_sum, 2, "thread")
    with pytest.raises(ParallelismValueError, match="At least one process is needed, not 0"):
        launch(_sum, 0)


def test_a_child_s_exception_propagates_and_its_peers_end() -> None:
    with pytest.raises(OwnError, match="no data for 1") as caught:
        launch(_fail, 2, "fork", (1,))
    assert caught.value.__notes__[0].startswith("Raised on rank 1:\nTraceback")
    assert 'raise OwnError(f"no data for {bad}")' in caught.value.__notes__[0]
    assert caught.value.__notes__[0].endswith("no data for 1\nThis was rank 1.")
    with pytest.raises(GeneratorExit) as exited:
        launch(_fail, 2, "fork", (1, GeneratorExit()))
    assert "This was rank 1." in exited.value.__notes__[0]
    with pytest.raises(ParallelismRuntimeError, match="exit status 7; the others were terminated"):
        launch(_die, 2, "fork")


def test_what_cannot_be_sent_is_refused() -> None:
    with pytest.raises(ParallelismValueError, match="'spawn' cannot send .*top level"):
        launch(lambda: None, 1, "spawn")


def test_a_process_of_a_launcher_s_does_not_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 3, "LOCAL_RANK": 1, "WORLD_SIZE": 4, "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with pytest.raises(RuntimeError, match=r"already, as rank 3 of 4.*LOCAL_RANK=1"):
        launch(_sum, 2, "spawn", (1,))


_SUM = """
import sys
from composer_dist.distributed import launch, process_group

def work(start):
    process_group.init()
    return process_group.all_reduce(start + process_group.world_and_rank()[1], "sum")

"""


def _output(folder: Path, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(script)
    command, variables = [sys.executable, "script.py"], {**os.environ, **environment}
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=120)


_PARALLEL = """
import torch
from composer_dist.distributed import launch

def work():
    return int(torch.ones(1_000_000).mul(2).sum())

work()
print("value", launch(work, 2, "fork"))
"""


@pytest.mark.slow
def test_a_fork_of_a_process_with_a_pool_of_threads_does_not_hang(tmp_path: Path) -> None:
    """OpenMP's threads have no copies, and an operation that needs them waits forever (torch 2.13)."""
    done = _output(tmp_path, _PARALLEL, OMP_NUM_THREADS="2", PYTHONWARNINGS="ignore")
    assert done.stdout == "value 2000000\n", done.stderr


@pytest.mark.slow
def test_a_script_without_the_guard_is_told_so(tmp_path: Path) -> None:
    done = _output(tmp_path, _SUM + 'print("value", launch(work, 1, "spawn", (1,)))')
    assert done.returncode == 1
    assert "value" not in done.stdout
    assert "ended with exit status 1 before it could start" in done.stderr
    assert 'under `if __name__ == "__main__":`' in done.stderr


def test_a_fork_inherits_no_group_from_the_caches_of_dtensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of a group has no threads: clearing the caches in the forked process waited forever."""
    steps = []

    def start(work: Any, arguments: tuple[Any, ...], **options: Any) -> Any:
        steps.append("fork")
        (arguments[-1] / "value").write_bytes(pickle.dumps(3))
        return mock.Mock(join=lambda: True)

    monkeypatch.setattr(launching, "clear_dtensor_caches", lambda: steps.append("clear"))
    monkeypatch.setattr(launching, "start_processes", start)
    assert launch(_sum, 2, "fork", (1,)) == 3
    assert steps == ["clear", "fork"]


_IMPORTED = """
import os, signal, sys, time
from composer_dist.distributed import launch

if __name__ != "__main__" and os.environ.get("CHILD"):
    os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C does to all processes of a terminal

def work():
    time.sleep(60)

if __name__ == "__main__":
    os.environ["CHILD"] = "1"
    launch(work, 2, "spawn")
"""


@pytest.mark.slow
def test_ctrl_c_while_a_process_imports_prints_no_traceback(tmp_path: Path) -> None:
    done = _output(tmp_path, _IMPORTED)
    assert "KeyboardInterrupt" not in done.stderr, done.stderr
