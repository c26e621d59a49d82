"""Checkpoints in local directories."""

import os
import threading
from pathlib import Path
from unittest.mock import patch

from composer_dist.checkpoint.storage.local import LocalPlace
from composer_dist.files.checkpoint_format import NAME


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
