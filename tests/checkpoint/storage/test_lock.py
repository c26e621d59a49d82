"""One process at a time has a folder, and a dead one keeps nobody out."""

import fcntl
import json
import os
import shutil
import signal
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest

from composer_dist.checkpoint.storage import lock as folder_lock
from composer_dist.checkpoint.storage.lock import FolderLock
from composer_dist.errors import CheckpointRuntimeError, ParallelismValueError
from tests.kit.grids import slow
from tests.kit.scripts.locking import NO_LOCKS, holding, started

ON = pytest.mark.parametrize("storage", [(), ("without",)], ids=["with locks", "without locks"])


@pytest.fixture(autouse=True)
def patience(storage: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "PATIENCE", 0)
    if storage:
        monkeypatch.setattr(fcntl, "flock", NO_LOCKS)


def of(folder: Path) -> FolderLock:
    return FolderLock(folder, f"out={folder}", "another out")


def line(process: "Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@ON
def test_the_owner_is_named_and_its_end_frees_the_folder(tmp_path: Path, storage: tuple[str, ...]) -> None:
    with holding(tmp_path, *storage) as owner:
        who = rf"Another run writes to out={tmp_path} \(process {owner.pid} on \S+, since 2\d\d\d-.*\): "
        with pytest.raises(ParallelismValueError, match=f"{who}.* end it, or choose another out"):
            of(tmp_path).take()
        owner.send_signal(signal.SIGSTOP)
        with pytest.raises(ParallelismValueError, match=who):
            of(tmp_path).take()
        owner.kill()
        os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)  # its parent has not asked: a zombie
        of(tmp_path).take()


@ON
def test_a_forked_child_does_not_hold_it_beyond_the_owners_end(tmp_path: Path, storage: Any) -> None:
    with holding(tmp_path, *storage, "forks") as owner:
        assert (tmp_path / ".lock").exists(), "the child has not released it"
        with pytest.raises(ParallelismValueError, match=f"process {owner.pid} "):
            of(tmp_path).take()
        owner.kill()
        owner.wait()
        lock = of(tmp_path)
        lock.take()
        lock.release()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("storage", "dead"), [((), True), slow(("without",), False), slow((), False), slow(("without",), True)]
)
def test_of_several_that_start_at_once_one_gets_it(tmp_path: Path, storage: Any, dead: bool) -> None:
    if dead:
        with holding(tmp_path, *storage):
            pass
        assert os.listdir(tmp_path) == [".lock"]
    racing = [started(tmp_path, *storage, "race") for _ in range(4)]
    assert [line(one) for one in racing] == ["ready\n"] * 4
    for one in racing:
        assert one.stdin is not None
        one.stdin.write("\n")
        one.stdin.flush()
    said = sorted(line(one) for one in racing)
    assert said[-1] == "taken\n"
    assert all(text.startswith("Another run writes") for text in said[:-1])
    for one in racing:
        one.communicate()
    assert os.listdir(tmp_path) == []


@ON
def test_locks_of_one_process_share_the_folder(tmp_path: Path, storage: Any) -> None:
    first, second = of(tmp_path), of(tmp_path / "." / "")
    first.take()
    second.take()
    first.release()
    assert os.listdir(tmp_path) == [".lock"]
    second.release()
    second.release()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("storage", [(), slow(("without",))])
def test_a_folder_that_was_removed_is_made_anew_unless_its_disk_is_gone(tmp_path: Path, storage: Any) -> None:
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    lock = of(folder)
    lock.take()
    lock.check()
    shutil.rmtree(tmp_path / "a")
    lock.check()
    with pytest.raises(AssertionError), holding(folder, *storage):
        pass
    shutil.rmtree(tmp_path / "a")
    for owned in folder_lock._owned.values():
        owned.device += 1
    with pytest.raises(CheckpointRuntimeError, match=f"The disk of {folder} is no longer mounted"):
        lock.check()
    assert os.listdir(tmp_path) == []
    lock.release()


@pytest.mark.parametrize("storage", [()])
def test_a_lock_whose_file_was_emptied_holds(tmp_path: Path, storage: Any) -> None:
    lock = of(tmp_path)
    lock.take()
    (tmp_path / ".lock").write_text("")
    lock.check()
    with pytest.raises(AssertionError), holding(tmp_path):
        pass
    lock.release()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("storage", [()])
def test_a_folder_that_cannot_be_made_anew_is_told(tmp_path: Path, storage: Any) -> None:
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    lock = of(folder)
    lock.take()
    shutil.rmtree(tmp_path / "a")
    (tmp_path / "a").touch()
    with pytest.raises(
        CheckpointRuntimeError, match=f"{folder} was removed, and cannot be made again: Not a dir"
    ):
        lock.check()
    (tmp_path / "a").unlink()
    lock.check()
    with pytest.raises(AssertionError), holding(folder):
        pass
    lock.release()


@pytest.mark.parametrize("storage", [("without",)])
def test_on_storage_without_locks_the_file_of_another_host_counts(tmp_path: Path, storage: Any) -> None:
    there = {"host": "elsewhere", "pid": 7, "since": "2026-01-01", "identity": ["boot", "space", "7", "1"]}
    (tmp_path / ".lock").write_text(json.dumps(there))
    text = rf"process 7 on elsewhere, since 2026-01-01.* on another host, remove {tmp_path}/.lock"
    with pytest.raises(ParallelismValueError, match=text):
        of(tmp_path).take()
    assert os.listdir(tmp_path) == [".lock"]
    (tmp_path / ".lock").write_text("")  # opened by one that found no locks
    of(tmp_path).take()
