"""Local processes: when one ends badly the others end too, and the first to fail is told."""

import signal
from pathlib import Path

import pytest

from composer_dist.cli import interrupt
from composer_dist.cli.launch import launch_local

# The agent (torch 2.13) leaves its log files to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")

HANGS_AS_RANK_0 = """\
import os, signal, sys, time
from pathlib import Path
from composer_dist.cli.launch import report_failure
spoken = Path(__file__).with_name("spoken")
if os.environ["RANK"] == "0":
    print("rank 0 speaks", flush=True)
    spoken.touch()
    time.sleep(600)
while not spoken.exists():
    time.sleep(0.01)
print("rank 1 wrote this", file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("end", "status", "told"),
    [
        ("report_failure('rank 1: no such thing'); sys.exit(2)", 2, "rank 1: no such thing\n"),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            137,
            "rank 1 wrote this\n"
            "composer-dist: rank 1 failed first (killed by SIGKILL); the other ranks were terminated.\n",
        ),
    ],
)
def test_the_first_to_fail_is_told_and_the_others_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], end: str, status: int, told: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(HANGS_AS_RANK_0 + end)
    assert launch_local(2, [str(script)]) == status
    assert capfd.readouterr() == ("rank 0 speaks\n", told)


FAIL_AT_ONCE = """\
import os, sys, time
from pathlib import Path
from composer_dist.cli.launch import report_failure
rank = int(os.environ["RANK"])
def wait(file):
    while not Path(file).exists():
        time.sleep(0.001)
if rank == 0:
    wait("cause")
report_failure(f"rank {rank} has failed")
Path("cause" if rank else "consequence").touch()
wait("consequence")
sys.exit(1)
"""


def test_the_first_of_several_at_the_same_second_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "script.py").write_text(FAIL_AT_ONCE)
    monkeypatch.chdir(tmp_path)
    assert launch_local(2, ["script.py"]) == 1
    assert capfd.readouterr().err == "rank 1 has failed\n"


def test_all_is_well(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'])")
    assert launch_local(2, [str(script)]) == 0
    assert capfd.readouterr() == ("0 2\n", "")


IS_INTERRUPTED = """\
import os, signal, time
from pathlib import Path
rank = int(os.environ["RANK"])
try:
    Path(f"{rank}-began").touch()
    while rank and not Path("0-began").exists():
        time.sleep(0.01)
    if rank:
        os.kill(os.getppid(), signal.SIGINT)
    time.sleep(600)
except KeyboardInterrupt:
    Path(f"{rank}-ended").touch()
    raise SystemExit(130)
"""


def test_ctrl_c_is_passed_on_and_told_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "script.py").write_text(IS_INTERRUPTED)
    monkeypatch.chdir(tmp_path)
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # ignored in what a shell starts with "&"
    try:
        assert launch_local(2, ["script.py"]) == interrupt.EXIT_STATUS == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert capfd.readouterr() == ("", interrupt.TOLD)
    assert len(list(tmp_path.glob("*-ended"))) == 2
