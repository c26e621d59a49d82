"""Ctrl-C while weights are delivered: every process ends, and leaves nothing behind."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from tests.kit.worker import HOST
from tests.kit.world import _host_store


def launch(rank: int, port: int, group: int, way: str, stderr: int | None) -> subprocess.Popen[str]:
    environment = os.environ | {
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TERM": "xterm",
        "COLUMNS": "200",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "tests.kit.scripts.interrupted", way],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if stderr is None else stderr,
        text=True,
        process_group=group,
    )


@pytest.mark.slow
@pytest.mark.parametrize("way", ["messages", "memory"])
def test_ctrl_c_during_delivery_ends_all_ranks_and_leaves_nothing(way: str) -> None:
    store = _host_store()
    terminal, theirs = pty.openpty()
    first = launch(0, store.port, 0, way, theirs)
    second = launch(1, store.port, first.pid, way, None)
    os.close(theirs)
    try:
        for rank in (first, second):
            assert reader(rank.stdout).readline() == "stalled\n"
            assert "/dev/shm/" not in Path(f"/proc/{rank.pid}/maps").read_text()
            assert Path(f"/proc/{rank.pid}/task/{rank.pid}/children").read_text() == ""
        os.killpg(first.pid, signal.SIGINT)
        said = [read_all(terminal), reader(second.stderr).read()]
        assert [first.wait(60), second.wait(60)] == [-signal.SIGINT] * 2
        with pytest.raises(ProcessLookupError):
            os.killpg(first.pid, 0)
    finally:
        for rank in (first, second):
            rank.kill()
            rank.communicate()
        os.close(terminal)
    for text in said:
        lines = text.split()
        assert lines.count("Traceback") == 1
        assert text.rstrip().endswith("KeyboardInterrupt")
    bar, _, traceback = said[0].partition("Traceback")
    assert "delivering weights" in bar
    assert bar.rindex("\x1b[?25h") > bar.rindex("\x1b[?25l")  # the cursor is visible again
    assert "\x1b[2K" in bar[bar.rindex("delivering weights") :]  # and the bar gone
    assert "\x1b[" not in traceback.replace("\x1b[0m", "")


def reader(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def read_all(terminal: int) -> str:
    """What a terminal shows until the last writer has gone."""
    text = b""
    while True:
        try:
            found = os.read(terminal, 4096)
        except OSError:  # how Linux says that there is no writer any more
            found = b""
        if not found:
            return text.decode()
        text += found
