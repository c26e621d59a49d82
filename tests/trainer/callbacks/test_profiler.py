"""Traces of the batches that were asked for."""

import gzip
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from composer_dist.errors import ParallelismValueError
from composer_dist.trainer import Profiler
from composer_dist.trainer.callbacks import profiler as module
from tests.kit.training import fitted, fitted_on_parts, quiet
from tests.kit.world import World


def steps(trace: Path) -> set[str]:
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return {one["name"] for one in events if one.get("name", "").startswith("ProfilerStep")}


@pytest.mark.promise(126)
def test_each_window_is_a_trace_of_its_last_batches(tmp_path: Path) -> None:
    fitted(callbacks=Profiler(tmp_path, skip_first=1, active=2, repeat=2), max_duration="9ba")
    traces = {one.name: steps(one) for one in tmp_path.iterdir()}
    assert traces == {
        "rank0-ba4.json.gz": {"ProfilerStep#2", "ProfilerStep#3"},  # counted from 0
        "rank0-ba7.json.gz": {"ProfilerStep#5", "ProfilerStep#6"},
    }


def profiled(folder: Path, ranks: Any) -> None:
    fitted_on_parts([6, 6], "ddp", callbacks=Profiler(folder, ranks=ranks, active=2), max_duration="5ba")


@pytest.mark.promise(126)
@pytest.mark.parametrize(("ranks", "written"), [((1,), [1]), (0, [0]), (None, [0, 1])])
def test_ranks_record_for_themselves(world2: World, tmp_path: Path, ranks: Any, written: list[int]) -> None:
    world2(profiled, tmp_path, ranks)
    assert sorted(one.name for one in tmp_path.iterdir()) == [f"rank{rank}-ba5.json.gz" for rank in written]


def test_a_fit_that_is_too_short_says_so(tmp_path: Path, caplog: Any) -> None:
    fitted(callbacks=Profiler(tmp_path, skip_first=10), max_duration="3ba")
    assert "the fit ended before there was anything to record (skip_first=10, wait=0" in caplog.text
    assert not list(tmp_path.iterdir())


def test_a_history_of_memory_is_written_beside_the_trace(tmp_path: Path) -> None:
    calls: list[Any] = []
    profiler = Profiler(tmp_path, skip_first=0, active=1, memory_snapshot=True)
    with (
        mock.patch.object(Profiler, "init"),
        mock.patch.object(module, "record_memory_history", lambda *how: calls.append(how)),
        mock.patch.object(module, "dump_memory_history", calls.append),
    ):
        fitted(callbacks=profiler, max_duration="2ba")
    assert calls == [(), str(tmp_path / "rank0-ba2.memory.pickle"), (None,)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"active": 0}, "active must be positive, not 0"),
        ({"wait": -1}, "wait must be 0 or more, not -1"),
        ({"ranks": (0, 1)}, "there is no rank 1; the ranks are 0 to 0"),
        ({"memory_snapshot": True}, "'cpu' keeps no history of its memory"),
    ],
)
def test_what_cannot_be_recorded_is_refused(options: Any, message: str) -> None:
    with pytest.raises(ParallelismValueError, match=message):
        quiet(callbacks=Profiler("unused", **options))
