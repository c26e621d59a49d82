"""Saves that the disk refuses, and folders that another process has."""

import errno
import logging
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch.distributed as dist

from composer_dist import FSDP2Config
from composer_dist.checkpoint import PendingSave, latest_checkpoint, load_checkpoint
from composer_dist.checkpoint.storage import lock
from composer_dist.checkpoint.storage.local import LocalPlace
from composer_dist.errors import CheckpointRuntimeError, CheckpointValueError, ParallelismValueError
from composer_dist.files.checked import LocalSink
from composer_dist.trainer import Callback, CheckpointSaver, Logger, State
from composer_dist.trainer.callbacks import checkpoint_saver
from tests.kit.grids import in_the_default_run
from tests.kit.scripts.locking import holding
from tests.kit.world import World
from tests.trainer.callbacks.test_checkpoint_saver import names, trainer


@contextmanager
def logged() -> Iterator[list[str]]:
    """What this library logs meanwhile."""
    texts: list[str] = []
    logger, handler = logging.getLogger("composer_dist"), logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)


def full(code: int) -> OSError:
    return OSError(code, os.strerror(code))


def some_fail(folder: Path, asynchronous: bool) -> list[str]:
    """The disk of rank 1 is full at batches 3 to 5."""
    write = LocalSink.write

    def refused(self: Any, data: Any) -> None:
        if dist.get_rank() == 1 and any(f"-ba{batch}." in self._file.name for batch in (3, 4, 5)):
            raise full(errno.ENOSPC)
        write(self, data)

    with patch.object(LocalSink, "write", refused), logged() as texts:
        trainer(CheckpointSaver(folder, "1ba", keep=3, asynchronous=asynchronous)).fit()
    return texts


@pytest.mark.parametrize("asynchronous", [False, True])
def test_training_continues_when_saves_fail(world2: World, tmp_path: Path, asynchronous: bool) -> None:
    first, second = world2(some_fail, tmp_path, asynchronous)
    warning, again = first
    assert warning.startswith(f"Not saved: Rank 1: Cannot write {tmp_path}/ep0-ba3/__1_")
    assert "No space left on device" in warning
    last = "Training continues, and the next save tries again. The last complete checkpoint: "
    assert warning.endswith(f"{last}{tmp_path}/ep0-ba2.")
    assert again == f"Saving works again: {tmp_path}/ep1-ba6 is complete."
    assert second == []
    assert names(tmp_path) == ["ep1-ba6", "ep1-ba7", "ep2-ba8"]


FAULTS = [
    ((LocalPlace, "reserve"), errno.EROFS),
    ((LocalPlace, "sink"), errno.ENOENT),
    ((LocalSink, "write"), errno.ENOSPC),
    ((LocalPlace, "finish"), errno.EIO),
]
LATE_AND_KINDS = [(False, "sharded"), (True, "full"), (False, "full"), (True, "sharded")]


@pytest.mark.parametrize(
    ("place", "code", "asynchronous", "kind"),
    in_the_default_run(
        *((*fault, late, kind) for fault, (late, kind) in zip(FAULTS, LATE_AND_KINDS, strict=True)),
        among=[
            (*fault, late, kind) for fault in FAULTS for late in (False, True) for kind in ("sharded", "full")
        ],
    ),
)
def test_a_run_whose_last_save_fails_fails_at_its_end(
    tmp_path: Path, place: tuple[type, str], code: int, asynchronous: bool, kind: Any
) -> None:
    run = trainer(
        CheckpointSaver(tmp_path, "1ba", asynchronous=asynchronous),
        parallelism_config=FSDP2Config(state_dict_type=kind),
    )
    run.fit(duration="2ba")
    fails, does = Mock(side_effect=full(code)), "save to" if place[1] == "reserve" else "write"
    wrong = pytest.raises(CheckpointRuntimeError, match=os.strerror(code))
    with logged() as texts, patch.object(*place, fails), wrong:
        run.fit()
    assert run.state.timestamp.batch == 8
    assert fails.call_count >= 6, "each save tries"
    (warning,) = texts
    assert warning.startswith(f"Not saved: Cannot {does} {tmp_path}/")
    assert warning.endswith(f"The last complete checkpoint: {tmp_path}/ep0-ba2.")
    assert names(tmp_path) == ["ep0-ba1", "ep0-ba2"]
    assert load_checkpoint(tmp_path / "latest")["state"]["timestamp"]["batch"] == 2


@contextmanager
def full_at(folder: Path, batch: int) -> Iterator[None]:
    """The disk of a folder is full when the checkpoint after this batch is written."""
    write = LocalSink.write

    def refused(self: Any, data: Any) -> None:
        if f"{folder}/" in self._file.name and f"-ba{batch}." in self._file.name:
            raise full(errno.ENOSPC)
        write(self, data)

    with patch.object(LocalSink, "write", refused):
        yield


def test_who_else_gets_the_error_of_a_save_does_not_make_it_complete(tmp_path: Path) -> None:
    class Looks(Callback):
        found: str | None = ""

        def batch_checkpoint(self, state: State, logger: Logger) -> None:
            if state.timestamp.batch == 3:
                with pytest.raises(CheckpointRuntimeError, match="No space left"):
                    latest_checkpoint(tmp_path)
                self.found = latest_checkpoint(tmp_path)

    looks, saver = Looks(), CheckpointSaver(tmp_path, "1ba", keep=1)
    run = trainer(callbacks=[saver, looks], max_duration="3ba")
    with full_at(tmp_path, 3), pytest.raises(CheckpointRuntimeError, match="No space left"):
        run.fit()
    assert looks.found == str(tmp_path / "ep0-ba2")
    assert names(tmp_path) == ["ep0-ba2"]
    assert os.readlink(tmp_path / "latest") == "ep0-ba2"


def test_a_full_disk_of_one_saver_does_not_keep_another_from_saving(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    savers = [CheckpointSaver(one, "1ba", keep=1), CheckpointSaver(other, "1ba", keep=None)]
    with full_at(one, 2), logged() as texts:
        trainer(*savers, max_duration="3ba").fit()
    assert names(one) == ["ep0-ba3"]
    assert names(other) == ["ep0-ba1", "ep0-ba2", "ep0-ba3"]
    elsewhere, refused, again = texts
    assert elsewhere.startswith(f"Another save in the background failed: Cannot write {one}/ep0-ba2/")
    assert refused.startswith(f"Not saved: Cannot write {one}/ep0-ba2/")
    assert refused.endswith(f"The last complete checkpoint: {one}/ep0-ba1.")
    assert again == f"Saving works again: {one}/ep0-ba3 is complete."


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_that_was_interrupted_is_not_taken_for_complete(tmp_path: Path, asynchronous: bool) -> None:
    run = trainer(CheckpointSaver(tmp_path, "1ba", keep=1, asynchronous=asynchronous))
    run.fit(duration="1ba")
    place = (PendingSave, "wait") if asynchronous else (LocalPlace, "finish")
    with full_at(tmp_path, 2 if asynchronous else 0):
        with patch.object(*place, Mock(side_effect=KeyboardInterrupt)), pytest.raises(KeyboardInterrupt):
            run.fit(duration="1ba")
        run.close()
    assert names(tmp_path) == ["ep0-ba1"]
    assert os.readlink(tmp_path / "latest") == "ep0-ba1"


def test_what_killed_saves_left_is_removed_by_the_next_save(tmp_path: Path) -> None:
    trainer(CheckpointSaver(tmp_path, "1ba", keep=None), max_duration="1ba").fit()
    (tmp_path / "ep0-ba1").rename(tmp_path / ".ep0-ba1.01234567.old")
    for name in (".ep0-ba8.01234567.tmp", ".ep0-ba9.01234567.gone", ".mine.01234567.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__0_01234567.distcp").write_bytes(b"x")
    (tmp_path / ".ep0-ba7.01234567.tmp").write_bytes(b"x")
    run = trainer(CheckpointSaver(tmp_path, "1ba", keep=None), resume=True, max_duration="2ba")
    assert run.state.timestamp.batch == 1
    run.fit()
    assert sorted(os.listdir(tmp_path)) == [".mine.01234567.tmp", "ep0-ba1", "ep0-ba2", "latest"]


def test_a_disk_that_fills_in_the_middle_of_a_file(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    run = trainer(CheckpointSaver(tmp_path, None))
    run.fit(duration="1ba")
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        with pytest.raises(CheckpointRuntimeError, match="distcp: File too large"):
            run.fit(duration="1ba")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names(tmp_path) == ["ep0-ba1"]


def test_a_full_disk_is_refused_at_once(tmp_path: Path) -> None:
    wrong = pytest.raises(CheckpointValueError, match=f"cannot be written to {tmp_path}: No space left")
    with patch("tempfile.TemporaryFile", Mock(side_effect=full(errno.ENOSPC))), wrong:
        trainer(CheckpointSaver(tmp_path))


def test_a_save_that_takes_long_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over, finish = threading.Event(), LocalPlace.finish
    monkeypatch.setattr(checkpoint_saver, "_PATIENCE", 0)

    def late(self: Any, *arguments: Any) -> None:
        over.wait()
        finish(self, *arguments)

    class Ends(Callback):
        def batch_end(self, state: State, logger: Logger) -> None:
            if state.timestamp.batch == 4:
                monkeypatch.setattr(checkpoint_saver, "_PATIENCE", 60)
                over.set()

    monkeypatch.setattr(LocalPlace, "finish", late)
    saver = CheckpointSaver(tmp_path, "1ba", keep=None)
    with logged() as texts:
        trainer(saver, callbacks=[saver, Ends()]).fit()
    assert texts == [
        f"{tmp_path}/ep0-ba1 is still being written. Training continues without the next one. "
        "The last complete checkpoint: none is found.",
        f"Saving works again: {tmp_path}/ep0-ba1 is complete.",
    ]
    assert {"ep0-ba1", "ep2-ba8"} <= set(names(tmp_path))
    assert not {"ep0-ba2", "ep0-ba3"} & set(names(tmp_path))


def refused(folder: Path, pid: int) -> str:
    with patch.object(lock, "PATIENCE", 0):
        text = f"Another run writes to the folder of checkpoints {folder} .process {pid} on "
        with pytest.raises(ParallelismValueError, match=text) as error:
            trainer(CheckpointSaver(folder))
    return str(error.value)


def test_a_folder_that_another_process_saves_to_is_refused(world2: World, tmp_path: Path) -> None:
    trainer(CheckpointSaver(tmp_path)).fit()
    assert names(tmp_path) == ["ep1-ba4", "ep2-ba8"], "no lock stays"
    with holding(tmp_path) as other:
        first, second = world2(refused, tmp_path, other.pid)
        assert first == second
        assert latest_checkpoint(tmp_path) == str(tmp_path / "ep2-ba8"), "who reads needs no lock"
        other.kill()
        other.wait()
        trainer(CheckpointSaver(tmp_path), resume=True).close()
