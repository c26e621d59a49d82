"""The driver of the coverage-guided cases, with a stand-in for atheris, which is an extra."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.behavior import test_fuzz
from tests.kit.guided import ROOT, TARGETS

STAND_IN = """
import contextlib
import random

def instrument_imports(include):
    return contextlib.nullcontext()

def Setup(argv, attempt):
    globals()["attempt"] = attempt

def Fuzz():
    chosen = random.Random(0)
    while True:
        attempt(chosen.randbytes(2048))
"""


def test_every_test_of_bad_input_is_a_target() -> None:
    tests = {name: getattr(test, "hypothesis", None) for name, test in vars(test_fuzz).items()}
    assert [name for name, handle in tests.items() if handle is not None] == TARGETS


@pytest.mark.slow
def test_cases_are_counted_and_a_failure_is_told(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        own = {**os.environ, "PYTHONPATH": str(tmp_path)}
        command = [sys.executable, "-m", "tests.kit.guided", *arguments]
        return subprocess.run(command, cwd=ROOT, env=own, text=True, capture_output=True)

    (tmp_path / "atheris.py").write_text(STAND_IN)
    passed = run("test_configurations", "--cases", "20")
    assert passed.returncode == 0, passed.stderr
    assert passed.stdout.startswith("test_configurations: 20 cases passed, ")
    (tmp_path / "atheris.py").write_text(
        STAND_IN.replace("attempt(chosen.randbytes(2048))", "raise SystemExit")
    )
    failed = run("test_configurations", "--cases", "20")
    assert failed.returncode == 1
    assert failed.stdout.startswith("test_configurations: FAILED")
    assert "there are test_runs, test_runs_written_otherwise" in run("test_run").stderr
    assert "--replay needs the name of one target" in run("--replay", "crash-1").stderr
