"""Ctrl-C: a run ends, all of it, says so in one sentence, and goes on later."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from composer_dist.checkpoint.latest import newest_intact
from composer_dist.cli.init import PRESETS
from composer_dist.cli.interrupt import TOLD
from composer_dist.distributed.ranks.waiting import poll

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LONG = ["trainer.max_duration=100000ba", "checkpoints.interval=5ba", "trainer.eval_interval=null"]


def start(out: Path, *arguments: str) -> subprocess.Popen[str]:
    """A run in a session of its own, as in a terminal."""
    command = [sys.executable, "-m", "composer_dist", "train", PRESETS / "vision.yaml", f"out={out}"]
    return subprocess.Popen(
        [*map(str, command), *LONG, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in what "&" starts
    )


def wait_for(what: str, condition: Callable[[], bool]) -> None:
    for _ in poll(timedelta(seconds=120), lambda: what):
        if condition():
            return
    raise AssertionError(f"In vain: {what}")


def left(out: Path) -> list[str]:
    """The processes of a run: they have its folder among their arguments."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has just ended
            found += [file.parent.name] if f"out={out}".encode() in file.read_bytes() else []
    return found


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("to", [os.kill, os.killpg])
def test_a_run_is_interrupted_and_goes_on(
    tmp_path: Path, processes: int, to: Callable[[int, int], None]
) -> None:
    """The signal comes from a terminal, to the process group, or from elsewhere, to one process."""
    out = tmp_path / "run"
    run = start(out, "-n", str(processes))
    wait_for("a checkpoint", (out / "checkpoints" / "latest").exists)
    to(run.pid, signal.SIGINT)
    printed, told = run.communicate(timeout=60)
    assert run.returncode == 130, told
    assert (told.count(TOLD), "Traceback" in printed + told) == (1, False), told
    assert not left(out)
    newest, _ = newest_intact(str(out / "checkpoints"))  # `latest` may not lead to it yet
    assert newest is not None
    saved = int(newest.rpartition("ba")[2])
    again = start(out, f"trainer.max_duration={saved + 3}ba", "-n", str(processes))
    _, told = again.communicate(timeout=240)
    assert again.returncode == 0, told
    rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    assert [row["batch"] for row in rows if "loss/train/total" in row] == list(range(1, saved + 4))


def test_a_second_one_does_not_wait_for_ranks_that_do_not_listen(tmp_path: Path) -> None:
    out = tmp_path / "run"
    deaf = f"callbacks={{tests.kit.scripts.recipes.Deaf: {{sign: {tmp_path}/deaf}}}}"
    run = start(out, deaf, "-n", "2")
    wait_for("both ranks", lambda: len(list(tmp_path.glob("deaf.*"))) == 2)
    run.send_signal(signal.SIGINT)
    while "Ctrl-C" not in run.stderr.readline():
        assert run.poll() is None
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=60)
    assert run.returncode == 130
    wait_for("the ranks to end with their launcher", lambda: not left(out))


def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run = start(out, "-n", "2")
    wait_for("a checkpoint", (out / "checkpoints" / "latest").exists)
    run.kill()
    run.communicate(timeout=60)
    wait_for("the ranks to end with their launcher", lambda: not left(out))


def test_while_nothing_is_open_ctrl_c_ends_the_process_though_an_import_swallows_it() -> None:
    code = (
        "import os, signal\nfrom composer_dist.cli.interrupt import CtrlC\n"
        "with CtrlC():\n"
        "    try:\n        os.kill(os.getpid(), signal.SIGINT)\n    except BaseException:\n        pass\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert done.stderr.startswith("\ncomposer-dist train: interrupted, stopping"), done.stderr
