"""A rank that makes no progress ends the run, with a report of which it is and where all ranks stand."""

import math
import signal
import subprocess
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composer_dist.distributed import HangGuard
from composer_dist.distributed.ranks.hangs import watcher
from composer_dist.distributed.ranks.hangs.beside import Beside
from composer_dist.distributed.ranks.hangs.guard import STATUS, Limits, _in_debugger
from composer_dist.distributed.ranks.hangs.report import cause, report
from composer_dist.distributed.ranks.hangs.stand import Entered, Frame, Stand, stack_in, stand_here
from composer_dist.errors import ParallelismValueError
from tests.kit.compare import fails
from tests.kit.world import on_ranks

pytestmark = pytest.mark.promise(117)
MINE = Frame("/home/me/train.py", 12, "main")
SITE = "/venv/lib/python3.11/site-packages/torch"
REDUCE = (MINE, Frame(f"{SITE}/distributed/c10d_logger.py", 83, "wrapper"))
REDUCE += (Frame(f"{SITE}/distributed/distributed_c10d.py", 3009, "all_reduce"),)
BACKWARD = (MINE, Frame(f"{SITE}/autograd/graph.py", 829, "_engine_run_backward"))
GATHER = (
    MINE,
    Frame(f"{SITE}/distributed/fsdp/_fully_shard/_fsdp_collectives.py", 364, "foreach_all_gather"),
)
DATA = (
    MINE,
    Frame(f"{SITE}/utils/data/dataloader.py", 700, "__next__"),
    Frame("/usr/lib/queue.py", 1, "get"),
)


def stand(rank: int, stack: tuple[Frame, ...] = REDUCE, number: int = 5, **options: object) -> Stand:
    entered = {"0": Entered([0, 1], number)}
    return Stand(rank, **{"doing": "step 3", "seconds": 60.0, "stack": stack, "entered": entered, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (stand(1, (MINE,), 4), "rank 1 is still in main (train.py:12) at step 3 while the others wait"),
        (stand(1, DATA, 4), "rank 1 waits for data at step 3 while the others wait in a collective"),
        (stand(1, GATHER, 4), "rank 1 waits in foreach_all_gather at step 3, while others wait in a"),
        (stand(1, BACKWARD), "all ranks wait in a collective (all_reduce, backward)"),
        (stand(1, (), state="stopped"), "rank 1 is stopped (by SIGSTOP or a debugger) at step 3"),
        (stand(1, (), state="blocked"), "rank 1 is blocked: a call in C holds Python's lock (the GIL)"),
        (stand(1, (), state="ended"), "rank 1 has ended; see its output at step 3"),
        (stand(1, (), state="silent"), "rank 1 does not answer"),
        (stand(1, (), state="failed", doing="ValueError: bad"), "rank 1 has failed: ValueError: bad"),
        (stand(1, (), state="left", doing=""), "rank 1 has left the guarded part"),
    ],
)
def test_the_first_cause_is_named(other: Stand, words: str) -> None:
    assert cause([stand(0), other]).startswith(f"The run hangs: {words}")


def test_of_several_ranks_all_are_named() -> None:
    stands = [stand(0), stand(1, (), state="ended"), stand(2, (), state="ended")]
    assert cause(stands).startswith("The run hangs: ranks 1, 2 have ended")


def test_the_report_says_where_each_rank_stands_and_each_stack_once() -> None:
    both = Entered([0, 1, 2], 5)
    stands = [stand(rank, entered={"0": both}) for rank in (0, 1)]
    stands.append(stand(2, (MINE,), entered={"0": Entered([0, 1, 2], 4)}, seconds=61.0))
    assert report(stands, 60, "step").splitlines() == [
        "The run hangs: rank 2 is still in main (train.py:12) at step 3 while the others wait in a "
        "collective (no progress for 60 s, the limit in section 'step').",
        *(
            f"  rank {rank}: step 3 in main (train.py:12), for 60 s, waits in all_reduce (collective 5 of "
            "the group of ranks 0, 1, 2) for rank 2"
            for rank in (0, 1)
        ),
        "  rank 2: step 3 in main (train.py:12), for 61 s, in no collective",
        "Stack of ranks 0, 1 (most recent call last):",
        *(f'  File "{one.file}", line {one.line}, in {one.function}' for one in REDUCE),
        "Stack of rank 2 (most recent call last):",
        '  File "/home/me/train.py", line 12, in main',
    ]


def test_a_stand_survives_the_store_and_a_dump_is_read() -> None:
    here = stand_here(1, "step 2", 0.5)
    assert here.stack[-2].function == "stand_here"
    assert Stand.unpacked(here.packed()) == here
    dump = (
        "Timeout (0:00:01)!\nThread 0x01 (most recent call first):\n"
        '  File "/a.py", line 1 in other\n\nThread 0x02 [python] (most recent call first):\n'
        '  File "/b.py", line 2 in inner\n  File "/b.py", line 3 in <module>\n'
    )
    assert stack_in(dump) == [Frame("/b.py", 3, "<module>"), Frame("/b.py", 2, "inner")]


@on_ranks(2)
def test_collectives_are_counted() -> None:
    dist.all_reduce(torch.ones(1))
    before = stand_here(0, "", 0.0).entered["0"]
    dist.all_reduce(torch.ones(1))
    assert stand_here(0, "", 0.0).entered["0"] == Entered([0, 1], before.number + 1)


def test_limits_are_given_or_learned() -> None:
    limits = Limits({"save": 20.0})
    limits.first = 900.0
    assert [limits.of("save"), limits.of("step")] == [20, 900]
    for seconds in (1, 40, 2):
        limits.saw("step", seconds)
    assert [limits.of("step"), limits.of("evaluation")] == [400, 900]
    for _ in range(3):
        limits.saw("evaluation", 1)
    assert [limits.of("evaluation"), Limits(5).of("step"), Limits(math.inf).off] == [300, 5, True]


@pytest.mark.parametrize("timeout", [0, -1.0, timedelta(0), {"step": 0}])
def test_a_timeout_that_is_not_positive_is_refused(timeout: object) -> None:
    with fails(ParallelismValueError, "timeout must be positive"):
        HangGuard(timeout)  # type: ignore[arg-type]


def test_steps_and_beats_are_progress() -> None:
    parameter = nn.Parameter(torch.ones(1))
    with HangGuard(600) as guard:
        torch.optim.SGD([parameter], lr=0.1).step()
        assert guard.doing() == "step 1"
        with guard.at("save"):
            assert guard.section == "save"
        with suppress(OSError), guard.at("save"):
            raise OSError
        assert guard.section == "step"
    torch.optim.SGD([parameter], lr=0.1).step()
    assert guard.doing() == "step 1"


def test_a_section_without_a_limit_is_watched_by_nobody() -> None:
    beside = Beside()
    for limit in (5.0, math.inf, 5.0):
        beside.keep(limit)
    beside.close()


def test_a_single_process_ends_too() -> None:
    script = "import time\nfrom composer_dist.distributed import HangGuard\n"
    script += "with HangGuard(0.5):\n    time.sleep(1000)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == STATUS
    assert "The run hangs: rank 0 is still in <module> (<string>:4) at step 0 (no progress" in done.stderr


@pytest.mark.slow
def test_a_log_on_a_full_disk_does_not_keep_a_run_from_ending() -> None:
    script = "import time\nfrom composer_dist.distributed import HangGuard\n"
    script += "with HangGuard(0.5):\n    time.sleep(1000)"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", script], stderr=full, timeout=60)
    assert done.returncode == STATUS


def test_while_a_debugger_waits_nothing_is_a_hang() -> None:
    found: list[bool] = []
    for file in ("/usr/lib/python3/bdb.py", "/home/me/train.py"):
        exec(compile("look()", file, "exec"), {"look": lambda: found.append(_in_debugger())})
    assert found == [True, False]


def test_a_watcher_ends_a_process_whose_threads_stand_still(tmp_path: Path) -> None:
    """It needs no other rank, and says where the threads were."""
    (dump := tmp_path / "dump").write_text("the stacks\n")
    script = f"""
import os, subprocess, sys, time
command = [sys.executable, "-I", "-S", {watcher.__file__!r}, str(os.getpid()), {str(dump)!r}]
process = subprocess.Popen(command, stdin=subprocess.PIPE)
os.write(process.stdin.fileno(), b"1\\n")
time.sleep(1000)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert "was ended: none of its Python threads has run for 1 s.\nthe stacks" in done.stderr
