"""Files that are written: what the disk is told while more is on its way."""

import os
from pathlib import Path

import pytest

from composer_dist.files import checked


def test_the_disk_starts_before_all_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int, int]] = []
    monkeypatch.setattr(checked, "_AHEAD", 1000)
    monkeypatch.setattr(os, "posix_fadvise", lambda file, *told_of: told.append(told_of))
    data = os.urandom(3500)
    sink = checked.LocalSink(tmp_path / "f")
    for start in range(0, 3500, 700):
        sink.write(memoryview(data)[start : start + 700])
    sink.close()
    assert [(start, size) for start, size, _ in told] == [(0, 1400), (1400, 1400)]
    assert {advice for *_, advice in told} == {os.POSIX_FADV_DONTNEED}
    assert (tmp_path / "f").read_bytes() == data
