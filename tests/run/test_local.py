"""Local processes: when one ends badly the others end too, and the first to fail is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from composer_dist.run.local import launch_local

# The agent (torch 2.13) leaves its log files to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")

HANGS_AS_RANK_0 = """\
import os, signal, sys, time
from composer_dist.run.local import report_failure
if os.environ["RANK"] == "0":
    print("rank 0 speaks", flush=True)
    time.sleep(600)
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
            "composer-dist: rank 1 failed first (killed by SIGKILL); the others were ended.\n",
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


def test_all_is_well(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'])")
    assert launch_local(2, [str(script)]) == 0
    assert capfd.readouterr() == ("0 2\n", "")
