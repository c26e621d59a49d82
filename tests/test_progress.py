"""Nothing for short steps, lines in a log, a bar on a terminal that goes when the step ends."""

import errno
import io
import subprocess
import sys
import threading
from typing import Any

import pytest

from composer_dist.progress import Display, Progress, Stage, tell
from composer_dist.trainer import ProgressBar
from tests.kit.training import Clock, Terminal, fitted

MIB = 1 << 20


def test_a_log_gets_a_line_after_two_seconds_and_then_every_ten() -> None:
    stream, clock, stage = io.StringIO(), Clock(100.0), Stage("delivering weights")
    display = Display(stage, stream, clock)
    stage.expect(3 * MIB)
    stage.expect(1 * MIB)
    for second in range(1, 26):
        clock.now = 100.0 + second
        stage.advance(MIB // 8)
        display.tick()
    display.close()
    assert stream.getvalue().splitlines() == [
        "delivering weights: 256.0 KiB of 4.0 MiB (6%), 128.0 KiB/s",
        "delivering weights: 1.5 MiB of 4.0 MiB (38%), 128.0 KiB/s",
        "delivering weights: 2.8 MiB of 4.0 MiB (69%), 128.0 KiB/s",
    ]


def test_a_terminal_gets_a_bar_that_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream, clock, stage = Terminal(), Clock(), Stage("initializing")
    display = Display(stage, stream, clock)
    clock.now += 1.9
    display.tick()
    assert stream.getvalue() == ""
    clock.now += 0.1
    display.tick()  # what there is to do is not known yet
    stage.expect(2 * MIB)
    stage.advance(MIB)
    display.tick()
    shown = stream.getvalue()
    assert "initializing" in shown
    assert "━━━" in shown
    assert "1.0 MiB of 2.0 MiB (50%), 512.0 KiB/s" in shown
    display.close()
    end = stream.getvalue()[len(shown) :]
    assert "\x1b[2K" in end  # the line is erased
    assert "\x1b[?25h" in end  # the cursor is visible again


class Waiting(io.StringIO):
    """Says when something has been written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def write(self, text: str) -> int:
        self.written.set()
        return super().write(text)


def watchers() -> int:
    return sum(thread.name == "composer_dist-progress" for thread in threading.enumerate())


def test_a_stage_is_shown_from_beside_even_when_nothing_moves() -> None:
    stream, clock = Waiting(), Clock()
    progress = Progress(True, stream, clock)

    def interrupted() -> None:
        with progress.stage("reading") as stage:
            stage.expect(10)
            clock.now += 5
            assert stream.written.wait(30)
            assert watchers() == 1
            with progress.stage("within") as inner:
                inner.expect(7)
            assert stage.total == 10
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert stream.getvalue() == "reading: 0 B of 10 B (0%), 0 B/s\n"
    assert watchers() == 0
    with progress.stage("the next one") as stage:
        assert stage.label == "the next one"


def test_other_ranks_only_count() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress(False, stream, clock).stage("reading") as stage:
        clock.now += 60
        assert watchers() == 0
        stage.advance(3)
    assert stage.done == 3
    assert stream.getvalue() == ""


def test_rich_is_not_imported_for_short_steps() -> None:
    code = (
        "import sys\n"
        "from composer_dist.progress import Progress\n"
        "with Progress(True).stage('short') as stage: stage.advance(1)\n"
        "assert 'rich' not in sys.modules and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_while_nothing_is_known_to_move_the_seconds_are_shown() -> None:
    stream, clock = io.StringIO(), Clock(100.0)
    display = Display(Stage("converting"), stream, clock)
    clock.now = 103.0
    display.tick()
    assert stream.getvalue() == "converting: 3 s\n"


class Failing(io.StringIO):
    def __init__(self, error: OSError) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


def test_a_log_on_a_full_disk_ends_nothing_and_one_that_nobody_reads_does(capsys: Any) -> None:
    tell("first")
    tell("second", Failing(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(BrokenPipeError):
        tell("third", Failing(BrokenPipeError()))
    assert capsys.readouterr() == ("", "first\n")


def test_training_goes_on_where_its_log_cannot_be_written() -> None:
    bar = ProgressBar(stream=Failing(OSError(errno.ENOSPC, "No space left on device")))
    trainer, _ = fitted(callbacks=[bar], max_duration="3ba")
    assert trainer.state.timestamp.batch == 3
