"""Lines in a log file, a bar on a terminal."""

import io
import re
from collections.abc import Iterator
from typing import Any

import pytest

from composer_dist.trainer import Evaluator, ProgressBar
from composer_dist.trainer.callbacks.progress_bar import _clock, _short
from tests.kit.training import Clock, Terminal, fitted, fitted_on_parts, joined, loader, quiet, tagged, tagger
from tests.kit.world import World

pytestmark = pytest.mark.promise(109)


def shown(stream: io.StringIO, **options: Any) -> list[str]:
    fitted(callbacks=ProgressBar(stream=stream, interval=2.0, clock=Clock(step=1)), **options)
    return stream.getvalue().splitlines()


def test_a_log_file_gets_lines() -> None:
    lines = shown(io.StringIO(), max_duration="2ep", eval_dataloader=loader())
    assert all(line.isprintable() for line in lines)
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d train  17%  epoch 1/2  batch 1/3  loss 1\.\d+  lr 0\.\d+.*", lines[0]
    )
    assert "left" not in lines[0]  # the first batch tells nothing about the others
    assert re.search(r"batch 3/3 .* samples/s  0:00:0\d left", lines[1])
    evaluations = [line for line in lines if "eval " in line and "loss" in line]
    assert [line.split("  loss ")[0][9:] for line in evaluations] == [
        "eval  100%  after epoch 1/2  batch 3/3",
        "eval  100%  after epoch 2/2  batch 3/3",
    ]
    assert all("MulticlassAccuracy 0." in line for line in evaluations)
    assert re.fullmatch(r".* train 100%  epoch 2/2  batch 3/3  loss 1\..*0:00:00 left", lines[-1])


@pytest.mark.parametrize(("duration", "where"), [("2ba", "batch 2/2"), ("8sp", "batch 2  8/8 samples")])
def test_the_place_is_told_in_the_durations_unit(duration: str, where: str) -> None:
    assert where in shown(io.StringIO(), max_duration=duration)[-1]


def test_tokens_are_told_where_there_are_any() -> None:
    data = [joined(tagged(4)[1:])] * 2
    lines = shown(io.StringIO(), max_duration="30tok", model=tagger(), train_dataloader=data)
    assert "batch 2  30/30 tokens" in lines[-1]
    assert lines[-1].count("tokens/s") == 1


def test_a_terminal_gets_a_bar_that_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    lines = shown(Terminal(), eval_dataloader=loader())
    assert lines[-1] == "\x1b[?25h"  # the cursor is visible again
    assert "train" in lines[-2]
    assert "━━━━" in lines[-2]
    assert "epoch 1/1  batch 3/3  loss 1." in lines[-2]
    assert sum("MulticlassAccuracy" in line for line in lines) == 1


def test_square_brackets_in_labels_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    lines = shown(Terminal(), eval_dataloader=Evaluator(label="val[en]", dataloader=loader()))
    assert any(re.search(r"val\[en\].*after epoch 1", line) for line in lines)


def test_a_narrow_terminal_cuts_the_end_of_the_text_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "50")
    last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown(Terminal())[-2])
    assert re.search(r"train +100% epoch 1/1  batch 3/3  loss 1\.\d+  \d", last), last
    assert "…" not in last


def test_a_terminal_gets_a_bar_with_several_ranks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert "━━━━" in shown(Terminal())[-2]


def test_numbers_are_short() -> None:
    numbers = [_short(n) for n in (0.5, 12.34, 999, 999.9, 12345, 3.2e6, 5e9, 7e13)]
    assert numbers == ["0.5", "12.3", "999", "1k", "12.3k", "3.2M", "5G", "70T"]
    assert _clock(3725.9) == "1:02:05"


def with_a_bar() -> None:
    fitted_on_parts([3, 3], "fsdp", progress_bar=True)


def test_only_rank_0_shows_progress(world2: World, capfd: pytest.CaptureFixture[str]) -> None:
    world2(with_a_bar)
    shown = capfd.readouterr().out.splitlines()
    assert [line.split(" ")[:2] for line in shown] == [["[rank", "0]"]] * len(shown)
    assert "train 100%  epoch 1/1  batch 4/4" in shown[-1]


class Mine(ProgressBar):
    """The user's own."""


@pytest.mark.promise(98)
def test_a_subclass_stands_for_the_bar() -> None:
    trainer, _ = quiet(callbacks=[Mine(stream=io.StringIO())], progress_bar=True)
    assert [type(one) for one in trainer.callbacks if isinstance(one, ProgressBar)] == [Mine]


def test_a_finished_run_of_unknown_length_shows_all_of_it() -> None:
    class Stream:
        def __iter__(self) -> Iterator[Any]:
            return iter(loader())

    lines = shown(io.StringIO(), max_duration="2ep", train_dataloader=Stream())
    assert re.fullmatch(r".* train 100%  epoch 2/2  batch 3  loss .*", lines[-1])
