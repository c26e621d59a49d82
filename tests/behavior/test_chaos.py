"""Faults at every step: a tenth of the cells of `make chaos`."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.faults import SLOW, quick_cells, table_cells


def tried(*options: str) -> None:
    """Try cells in a process without threads, from which the ranks are forked."""
    command = [sys.executable, "-m", "tests.kit.faults", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]


@pytest.mark.promise(108, 117)
def test_faults_and_a_hang_end_the_run_and_are_named() -> None:
    tried("--quick")


@pytest.mark.slow
@pytest.mark.promise(117)
def test_hangs_end_the_run_and_are_named() -> None:
    tried("--steps", "write", "--kinds", "stall", "GIL", "--ranks", "1")


def test_a_tenth_of_the_cells_is_tried_by_default() -> None:
    assert len(table_cells()) >= 200
    assert 10 * len(quick_cells()) >= len(table_cells())
    assert any(one.kind in SLOW for one in quick_cells())
