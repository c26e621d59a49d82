"""Faults at every step: a tenth of the cells of `make chaos`."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.faults import quick_cells, table_cells


def tried(*options: str) -> None:
    """Try cells in a process without threads, from which the ranks are forked."""
    command = [sys.executable, "-m", "tests.kit.faults", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]


@pytest.mark.promise(108)
def test_faults_end_the_run_and_are_named() -> None:
    tried("--quick")


@pytest.mark.promise(117)
@pytest.mark.parametrize(
    "options",
    [
        ["--steps", "before_forward", "--kinds", "SIGSTOP", "--ranks", "0"],  # it hosts the store
        pytest.param(["--steps", "write", "--kinds", "stall", "GIL", "--ranks", "1"], marks=pytest.mark.slow),
    ],
)
def test_hangs_end_the_run_and_are_named(options: list[str]) -> None:
    tried(*options)


def test_a_tenth_of_the_cells_is_tried_by_default() -> None:
    assert len(table_cells()) >= 200
    assert 10 * len(quick_cells()) >= len(table_cells())
