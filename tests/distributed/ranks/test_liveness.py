"""A process that has ended is known to have; of any other, nothing is claimed."""

import json
import os
import subprocess
import sys

import pytest

from composer_dist.distributed.ranks.liveness import has_ended, identify

pytestmark = pytest.mark.promise(108)

SHOW = (
    "import json; from composer_dist.distributed.ranks.liveness import identify;print(json.dumps(identify()))"
)


def test_this_process_runs():
    me = identify()
    assert me is not None
    assert me[2] == str(os.getpid())
    assert not has_ended(me)


def test_a_child_that_has_ended_has():
    child = subprocess.run([sys.executable, "-c", SHOW], capture_output=True, check=True, text=True)
    assert has_ended(json.loads(child.stdout))


def test_a_child_that_waits_has_not_and_a_zombie_has():
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    me = identify()
    with open(f"/proc/{child.pid}/stat") as stat:
        start = stat.read().rpartition(")")[2].split()[19]
    theirs = [*me[:2], str(child.pid), start]
    assert not has_ended(theirs)
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now: not yet reaped
    assert has_ended(theirs)
    child.wait()
    assert has_ended(theirs)


def test_a_pid_that_is_used_again_is_another_process():
    me = identify()
    assert has_ended([*me[:3], str(int(me[3]) - 1)])


def test_of_other_hosts_and_containers_nothing_is_known():
    me = identify()
    gone = str(2**22 - 1)
    assert has_ended([*me[:2], gone, "1"])
    assert not has_ended(["another boot", me[1], gone, "1"])
    assert not has_ended([me[0], "pid:[1]", gone, "1"])
    assert not has_ended(None)
