"""Waiting for an end, interrupted at every instruction."""

import ctypes
import signal
import sys
import threading
from functools import partial
from operator import call
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from composer_dist import ending
from composer_dist.ending import Ending

pytestmark = pytest.mark.promise(108)


def wait_interrupted(one: Ending, at: int) -> bool:
    """Waits, with a KeyboardInterrupt at the n-th event of the interpreter; whether there were so many."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename not in (ending.__file__, threading.__file__):
            return None
        count += 1
        if count == at:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        one.wait(0.001)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("already", [False, True])
def test_whoever_waits_may_be_interrupted_anywhere(already: bool) -> None:
    at = 0
    while True:
        one, at = Ending(), at + 1
        if already:
            one.set()
        if not wait_interrupted(one, at):
            break
        if not already:
            setting = threading.Thread(target=one.set, daemon=True)
            setting.start()
            setting.join(10)
            assert not setting.is_alive()
        assert one.wait(10)
        assert one.is_set()
    assert at > 3


def test_it_wakes_who_waits_and_is_over_for_all() -> None:
    one = Ending()
    assert not one.wait(0.001)
    threading.Timer(0.01, one.set).start()
    assert one.wait()
    assert one.wait()


def test_ctrl_c_is_noticed_that_comes_just_before_the_lock_blocks() -> None:
    """Between the two calls, all in C, Python does not look for signals."""
    one, ctrl_c = Ending(), partial(ctypes.PyDLL(None)["raise"], int(signal.SIGINT))
    lock = one._held

    def acquire(timeout: float) -> bool:
        return max(map(call, (ctrl_c, partial(lock.acquire, True, timeout))))

    one._held = SimpleNamespace(acquire=acquire, release=lock.release)  # type: ignore[assignment]
    timer = threading.Timer(20, one.set)
    timer.start()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            one.wait()
    finally:
        signal.signal(signal.SIGINT, before)
        timer.cancel()
    assert not one.is_set()
