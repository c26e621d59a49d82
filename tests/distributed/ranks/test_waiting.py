"""A long wait says what it is for, once."""

import logging
from datetime import timedelta

import pytest

from composer_dist.distributed.ranks import waiting

pytestmark = pytest.mark.promise(108)


def test_a_long_wait_is_logged_once(monkeypatch, caplog):
    now = [0.0]
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(waiting.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + 5))
    with caplog.at_level(logging.WARNING, "composer_dist"):
        turns = sum(1 for _ in waiting.poll(timedelta(seconds=60), lambda: "rank 1 at 'the mesh'"))
    assert turns == 13
    assert caplog.messages == ["Waiting for rank 1 at 'the mesh', for 60 s at most."]


def test_a_short_wait_says_nothing(caplog):
    assert sum(1 for _ in waiting.poll(timedelta(0), lambda: "nobody")) == 1
    assert caplog.messages == []


def test_a_task_hands_over_its_value_and_its_error():
    done = waiting.Task(lambda: 3)
    done.done.wait()
    assert done.result() == 3
    failed = waiting.Task(lambda: [][0])
    failed.done.wait()
    with pytest.raises(IndexError):
        failed.result()
