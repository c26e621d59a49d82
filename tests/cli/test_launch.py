"""Local processes: when one ends badly the others end too, and the first to fail is told."""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from composer_dist.cli import interrupt
from composer_dist.cli.launch import _with_output, launch_local, report_failure

# The agent (torch 2.13) leaves its log files to the garbage collector.
pytestmark = [
    pytest.mark.promise(108),
    pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning"),
]

Launch = Callable[[str], int]
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    """Runs a script on two local processes, in the test's folder; the exit status."""
    monkeypatch.chdir(tmp_path)

    def run(code: str) -> int:
        Path("script.py").write_text(IMPORTS + code)
        return launch_local(2, ["script.py"])

    return run


IMPORTS = """\
import os, signal, sys, time
from pathlib import Path
from composer_dist.cli.launch import report_failure
rank = int(os.environ["RANK"])
def wait(file):
    while not Path(file).exists():
        time.sleep(0.001)
"""
HANGS_AS_RANK_0 = """\
if rank == 0:
    print("rank 0 speaks", flush=True)
    Path("spoken").touch()
    time.sleep(600)
wait("spoken")
print("rank 1 wrote this", file=sys.stderr)
"""
FAILED_FIRST = "composer-dist: rank 1 failed first (killed by SIGKILL); the other ranks were terminated.\n"


@pytest.mark.parametrize(
    ("end", "status", "told"),
    [
        ("report_failure('rank 1: no such thing'); sys.exit(2)", 2, "rank 1: no such thing\n"),
        ("report_failure('of the user', status=1); sys.exit(2)", 1, "of the user\n"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, f"rank 1 wrote this\n{FAILED_FIRST}"),
    ],
)
def test_the_first_to_fail_is_told_and_the_others_end(
    launch: Launch, capfd: Capture, end: str, status: int, told: str
) -> None:
    assert launch(HANGS_AS_RANK_0 + end) == status
    assert capfd.readouterr() == ("rank 0 speaks\n", told)


FAIL_AT_ONCE = """\
if rank == 0:
    wait("cause")
report_failure(f"rank {rank} has failed")
Path("cause" if rank else "consequence").touch()
wait("consequence")
sys.exit(1)
"""


READS_THE_STORE = """\
import torch, torch.distributed as dist
address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
store = dist.TCPStore(address, port, is_master=False)
found = [store.get(key) for key in store.list_keys()]
print(rank, address, len(found) > 2, any(value.startswith((b"\\x80", b"gA")) for value in found))
dist.barrier()
"""


@pytest.mark.slow
@pytest.mark.promise(107)
def test_the_store_of_the_ranks_is_on_loopback_and_has_no_pickles(launch: Launch, capfd: Capture) -> None:
    assert launch(READS_THE_STORE) == 0
    assert capfd.readouterr().out == "0 127.0.0.1 True False\n"


def test_the_first_of_several_at_the_same_second_is_told(launch: Launch, capfd: Capture) -> None:
    assert launch(FAIL_AT_ONCE) == 1
    assert capfd.readouterr().err == "rank 1 has failed\n"


def test_all_is_well(launch: Launch, capfd: Capture) -> None:
    assert launch("print(rank, os.environ['WORLD_SIZE'])") == 0
    assert capfd.readouterr() == ("0 2\n", "")


IS_INTERRUPTED = """\
interrupts = rank == 1
try:
    Path(f"{rank}-began").touch()
    if interrupts:
        wait("0-began")
        os.kill(os.getppid(), signal.SIGINT)
    wait("its signal")  # one that comes just before a long sleep is handled after it
except KeyboardInterrupt:
    Path(f"{rank}-ended").touch()
    raise SystemExit(130)
"""


def test_ctrl_c_is_passed_on_and_told_once(launch: Launch, capfd: Capture, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what "&" starts
    try:
        assert launch(IS_INTERRUPTED) == interrupt.EXIT_STATUS == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert capfd.readouterr() == ("", interrupt.TOLD)
    assert len(list(tmp_path.glob("*-ended"))) == 2


def test_ctrl_c_while_a_rank_is_being_started_ends_those_that_run(
    launch: Launch, capfd: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent knows no rank before it has started all, and ends only those that it knows."""
    start = SubprocessHandler._popen

    def interrupted(self: SubprocessHandler, *arguments: Any) -> Any:
        if self.local_rank_id == 1:
            while not (tmp_path / "0-began").exists():
                time.sleep(0.001)
            signal.raise_signal(signal.SIGINT)
        return start(self, *arguments)

    monkeypatch.setattr(SubprocessHandler, "_popen", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert launch(IS_INTERRUPTED.replace("rank == 1", "False")) == interrupt.EXIT_STATUS
    finally:
        signal.signal(signal.SIGINT, before)
    assert capfd.readouterr() == ("", interrupt.TOLD)
    assert (tmp_path / "0-ended").exists()


def test_a_rank_without_lines_of_the_user_is_told_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = []
    for own in (False, True):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
        report_failure("it", own=own)
        times.append(json.loads((tmp_path / "error.json").read_text())["at"])
    assert times[0] > times[1] + 1


@pytest.mark.parametrize("see", ["; see the output there.", ". See its output."])
def test_output_that_a_message_points_to_is_shown_because_its_file_is_removed(
    tmp_path: Path, see: str
) -> None:
    for rank, text in (("0", "of a rank that has reported"), ("1", "the reason\n")):
        (tmp_path / rank).mkdir()
        (tmp_path / rank / "stderr.log").write_text(text)
    (tmp_path / "0" / "error.json").touch()
    text = f"Rank 1 ended at 'the data'{see}"
    assert _with_output(text, tmp_path) == "the reason\nRank 1 ended at 'the data'; its output is above."
    (tmp_path / "1" / "stderr.log").write_text("")
    assert _with_output(text, tmp_path) == "Rank 1 ended at 'the data'; it printed nothing to its log."
    assert _with_output("Another error.", tmp_path) == "Another error."


HANGS = """\
import torch.distributed as dist
from composer_dist.distributed import HangGuard, process_group
process_group.init("gloo")
store = dist.distributed_c10d._get_default_store()
with HangGuard(1) as guard:
    while not store.check(["composer_dist/hang/0/0/process/0"]):  # the guards know of rank 0's process
        time.sleep(0.1)
        guard.beat()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    process_group.barrier()
"""


@pytest.mark.slow
@pytest.mark.promise(117)
def test_a_hang_is_told_by_a_rank_that_runs(launch: Launch, capfd: Capture) -> None:
    assert launch(HANGS) == 75
    first, *rest = capfd.readouterr().err.splitlines()
    assert first.startswith(
        "composer-dist: The run hangs: rank 0 is stopped (by SIGSTOP or a debugger) at step 0"
    )
    assert rest[1].startswith("  rank 1: step 0 in <module> (script.py:18), for 1 s, waits in barrier (")
