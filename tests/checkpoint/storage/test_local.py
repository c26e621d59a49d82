"""Checkpoints in local directories."""

import os
import shutil
import threading
from pathlib import Path
from unittest.mock import patch

from composer_dist.checkpoint import latest_checkpoint, save_checkpoint
from composer_dist.checkpoint.storage.local import LocalPlace
from composer_dist.files.checkpoint_format import NAME
from tests.kit.toy import stateful


def test_removal_does_not_wait_for_the_file_system_to_free_the_files(tmp_path: Path) -> None:
    place, freed = tmp_path / "c", threading.Event()
    place.mkdir()
    for name in (NAME, "__0_00000000.distcp"):
        (place / name).write_bytes(b"x")
    os.mkfifo(place / "pipe")
    closed: list[int] = []

    def close(descriptor: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert freed.wait(10)
            closed.append(descriptor)
        os_close(descriptor)

    os_close = os.close
    with patch("os.close", close):
        LocalPlace(place).remove()
        assert not place.exists()
        assert not closed
        freed.set()
        for thread in threading.enumerate():
            if thread.name == "composer_dist-free":
                thread.join()
    assert len(closed) == 3, "the mark, the data and the pipe"


def test_copies_stay_in_the_order_of_saving(tmp_path: Path) -> None:
    model = stateful()
    for step in range(8, 12):
        save_checkpoint(tmp_path / "run" / f"step-{step}", {"model": model})
    expected = [f"step-{step}" for step in (11, 10, 9, 8)]
    copy = tmp_path / "copy"
    for number, name in enumerate(expected):  # the newest first, as `cp -r` may do
        shutil.copytree(tmp_path / "run" / name, copy / name)
        os.utime(copy / name / NAME, (number, number))
    assert [os.path.basename(path) for path in LocalPlace(copy).inside()] == expected
    assert latest_checkpoint(copy) == str(copy / "step-11")
    save_checkpoint(copy / "step-12", {"model": model}, keep=2)
    assert sorted(os.listdir(copy)) == ["step-11", "step-12"]


def test_without_a_time_the_file_has_it(tmp_path: Path) -> None:
    model = stateful()
    for number, name in enumerate(("older", "newer")):
        save_checkpoint(tmp_path / name, {"model": model}, sharded=False)
        os.utime(tmp_path / name, (number, number))
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / NAME).write_text("{}")
    os.utime(tmp_path / "damaged" / NAME, (0.5, 0.5))
    found = [os.path.basename(path) for path in LocalPlace(tmp_path).inside()]
    assert found == ["newer", "damaged", "older"]


def test_checkpoints_that_were_moved_and_linked_back_count(tmp_path: Path) -> None:
    model, folder, disk = stateful(), tmp_path / "run", tmp_path / "disk"
    disk.mkdir()
    for name in ("a", "b", "c"):
        save_checkpoint(folder / name, {"model": model})
        shutil.move(folder / name, disk / name)
        (folder / name).symlink_to(disk / name)
    (folder / "latest").symlink_to("c")
    (folder / "best").symlink_to(folder / "a")
    (folder / "nowhere").symlink_to(disk / "nowhere")
    assert [os.path.basename(path) for path in LocalPlace(folder).inside()] == ["c", "b", "a"]
    assert latest_checkpoint(folder) == str(folder / "c")
    save_checkpoint(folder / "d", {"model": model}, keep=2)
    assert sorted(os.listdir(folder)) == ["best", "c", "d", "latest", "nowhere"]
    assert sorted(os.listdir(disk)) == ["a", "b", "c"]
