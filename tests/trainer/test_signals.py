"""SIGTERM, SIGKILL, and launchers that start again."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.utils.data import DataLoader, Dataset, IterableDataset

from composer_dist.trainer import CheckpointSaver, DistributedDataLoader, StreamingDataLoader
from composer_dist.trainer.data.position import Reading
from tests.kit.compare import same, weights
from tests.kit.grids import crossed
from tests.kit.scripts.killable import GLOBAL_BATCH, SAMPLES, Ending, build
from tests.kit.training import At, raising
from tests.kit.world import World

BATCHES = 18


def whole(folder: Path, parallel: bool = False) -> dict[str, torch.Tensor]:
    folder.mkdir(exist_ok=True)
    trainer = build(folder, parallel=parallel)
    trainer.fit()
    return weights(trainer.state.model)


def check_samples(folder: Path) -> None:
    """Every sample once in each epoch, whichever process and rank had it."""
    per_epoch = -(-SAMPLES // GLOBAL_BATCH)
    for epoch in range(3):
        found: list[float] = []
        for batch in range(epoch * per_epoch + 1, (epoch + 1) * per_epoch + 1):
            for note in folder.glob(f"batch-{batch}-*.json"):
                found += json.loads(note.read_text())["samples"]
        assert len(found) == len(set(found)) == SAMPLES


def terminated(folder: Path, rank: int, parallel: bool, during: int) -> None:
    folder.mkdir(exist_ok=True)
    before = signal.getsignal(signal.SIGTERM)
    trainer = build(folder, Ending(folder, during, signal.SIGTERM, rank), parallel=parallel)
    with pytest.raises(SystemExit, match=r"^143$"):
        trainer.fit()
    assert signal.getsignal(signal.SIGTERM) is before
    batch = trainer.state.timestamp.batch
    assert batch in (during + 1, during + 2)  # the one under way, or the next
    again = build(folder, parallel=parallel)
    assert again.state.timestamp.batch == batch
    again.fit()
    same(weights(again.state.model), whole(folder.with_name("whole"), parallel))


@pytest.mark.promise(100)
@crossed({"parallel": [False, True], "during": [4, 5]})
def test_sigterm_saves_and_ends_all_ranks(world2: World, tmp_path: Path, parallel: bool, during: int) -> None:
    if parallel:
        world2(terminated, tmp_path / "run", 1, True, during)
    else:
        terminated(tmp_path / "run", 0, False, during)
    check_samples(tmp_path / "run")


@pytest.mark.promise(100)
def test_sigterm_at_the_very_end_is_not_lost(tmp_path: Path) -> None:
    trainer = build(tmp_path, Ending(tmp_path, BATCHES - 1, signal.SIGTERM, 0), parallel=False)
    with pytest.raises(SystemExit, match=r"^143$"):
        trainer.fit()
    assert build(tmp_path, parallel=False).state.timestamp.batch == BATCHES


def test_the_handler_goes_with_the_fit(tmp_path: Path) -> None:
    mine = Mock()
    original = signal.signal(signal.SIGTERM, mine)
    try:
        trainer = build(tmp_path, parallel=False)
        assert signal.getsignal(signal.SIGTERM) is mine
        trainer.fit(duration="1ba")
        assert signal.getsignal(signal.SIGTERM) is mine
        with pytest.raises(ArithmeticError):
            build(tmp_path, At(batch_end=raising(ArithmeticError())), parallel=False).fit()
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, original)


def test_a_fit_in_another_thread_leaves_signals_alone(tmp_path: Path) -> None:
    trainer = build(tmp_path, parallel=False)
    thread = threading.Thread(target=trainer.fit, kwargs={"duration": "1ba"})
    thread.start()
    thread.join()
    assert trainer.state.timestamp.batch == 1
    assert (tmp_path / "checkpoints" / "ep0-ba1").is_dir()


def test_sigterm_can_be_left_alone(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    saver = CheckpointSaver(tmp_path, on_sigterm=False)
    trainer = build(tmp_path, parallel=False)
    saver.fit_start(trainer.state, trainer.logger)
    assert signal.getsignal(signal.SIGTERM) == before


class Workers(Dataset[int]):
    """Each sample is the process that made it."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return os.getpid()


class StreamedWorkers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return (os.getpid() for _ in range(8))

    def split(self, num_replicas: int, rank: int) -> Any:
        return self


@pytest.mark.promise(100)
@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (DataLoader, Workers()),
        (DistributedDataLoader, Workers()),
        (DistributedDataLoader, StreamedWorkers()),
        (StreamingDataLoader, StreamedWorkers()),
    ],
)
def test_only_their_parent_ends_workers(kind: Any, data: Any) -> None:
    """A scheduler sends SIGTERM to every process of a job; the parent needs their batches until it saves."""
    reading = Reading(kind(data, batch_size=1, num_workers=1))
    process = int(next(reading))
    subprocess.run(["kill", "-TERM", str(process)], check=True)
    assert [int(next(reading)) for _ in range(4)] == [process] * 4
    (worker,) = (one for one in active_children() if one.pid == process)
    del reading
    worker.join(20)
    assert worker.exitcode == 0


class Stuck(Workers):
    """Starts a program that a worker has to be able to end; and hangs after its first sample."""

    def __getitem__(self, index: int) -> int:
        with subprocess.Popen(["sleep", "infinity"]) as program:
            program.terminate()
        if index:
            time.sleep(1e6)
        return super().__getitem__(index)


CLOSES = """
from tests.trainer.test_signals import DistributedDataLoader, Reading, Stuck
reading = Reading(DistributedDataLoader(Stuck(), batch_size=1, num_workers=1, shuffle=False))
print(next(reading).item())
"""


@pytest.mark.slow
@pytest.mark.parametrize("last", ["", "del reading"])
def test_a_worker_that_hangs_is_ended_with_its_loader_or_parent(last: str) -> None:
    with start(sys.executable, "-c", CLOSES + last) as parent:
        output, _ = parent.communicate(timeout=100)
    assert parent.returncode == 0
    with pytest.raises(ProcessLookupError):
        os.kill(int(output.split()[-1]), 0)


def start(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ended(process: subprocess.Popen[str]) -> int:
    output, _ = process.communicate(timeout=240)
    print(output)
    return process.returncode


@pytest.mark.slow
@pytest.mark.promise(100)
def test_killed_and_resumed_is_bit_equal(tmp_path: Path) -> None:
    run = tmp_path / "run"
    script = start(sys.executable, "-m", "tests.kit.scripts.killable", str(run), "7", "SIGKILL", "0")
    assert ended(script) == -signal.SIGKILL
    again = build(run, parallel=False)
    assert again.state.timestamp.batch in (4, 6)  # the last one may not have been complete
    again.fit()
    same(weights(again.state.model), whole(tmp_path / "whole"))
    check_samples(run)


def torchrun(*arguments: str) -> Callable[[], subprocess.Popen[str]]:
    """Each call starts a torchrun of the script."""
    return partial(start, sys.executable, "-m", "torch.distributed.run", *arguments)


@pytest.fixture
def endpoint() -> Iterator[str]:
    """Where agents meet, on a host that stays: with that one a job would be lost."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield f"127.0.0.1:{store.port}"
    del store


def agents(endpoint: str, nodes: str, *arguments: str) -> Callable[[], subprocess.Popen[str]]:
    """Each call starts the torchrun of one more host."""
    meeting = f"--rdzv-backend=c10d --rdzv-endpoint={endpoint} --rdzv-id=test"
    conf = "--rdzv-conf=is_host=false,last_call_timeout=3"
    options = *meeting.split(), conf, f"--nnodes={nodes}", "--nproc-per-node=1", "--max-restarts=2"
    return torchrun(*options, "-m", "tests.kit.scripts.killable", *arguments)


@pytest.mark.promise(100)
@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, 2])
def test_torchrun_restarts_a_killed_run(world2: World, tmp_path: Path, endpoint: str, hosts: int) -> None:
    run = tmp_path / "run"
    arguments = str(run), "7", "SIGKILL", "1"
    one_host = "--standalone", "--nproc-per-node=2", "--max-restarts=1", "-m", "tests.kit.scripts.killable"
    agent = torchrun(*one_host, *arguments) if hosts == 1 else agents(endpoint, "2", *arguments)
    assert [ended(one) for one in [agent() for _ in range(hosts)]] == [0] * hosts
    same(torch.load(run / "final.pt"), world2(whole, tmp_path / "whole", True)[0])
    check_samples(run)


@pytest.mark.promise(100)
@pytest.mark.slow
def test_when_a_host_is_taken_away_the_others_continue(tmp_path: Path, endpoint: str) -> None:
    run = tmp_path / "run"
    agent = agents(endpoint, "1:2", str(run), "7", "SIGTERM", "1", "parent")
    found = [ended(one) for one in (agent(), agent())]
    assert sorted(code == 0 for code in found) == [False, True]
    assert (run / "final.pt").exists()
    assert {json.loads(note.read_text())["world"] for note in run.glob("batch-*.json")} == {1, 2}
    check_samples(run)


@pytest.mark.promise(100)
@pytest.mark.slow
def test_a_host_that_comes_later_takes_part(tmp_path: Path, endpoint: str, monkeypatch: Any) -> None:
    # By default an agent keeps the address of the first attempt's store to itself (torch 2.13).
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    run = tmp_path / "run"
    agent = agents(endpoint, "1:2", str(run), "7", "wait", "0")
    first = agent()
    while not (run / "waiting").exists():
        assert first.poll() is None, first.communicate()
        time.sleep(0.1)
    second = agent()
    assert [ended(first), ended(second)] == [0, 0]
    worlds = [json.loads((run / f"batch-{batch}-0.json").read_text())["world"] for batch in (1, BATCHES)]
    assert worlds == [1, 2]
    check_samples(run)
