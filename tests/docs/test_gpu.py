"""docs/gpu.md names what exists, and on a machine without a GPU its commands say so."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "gpu.md").read_text()
FILES = set(re.findall(r"^\| `(tests/\S+\.py)`", PAGE, re.MULTILINE))
COMMANDS = re.findall(r"^python (benchmarks/\S+) (.*--device cuda.*)$", PAGE, re.MULTILINE)


def test_every_test_that_needs_a_gpu_is_on_the_page() -> None:
    """By file; the table names no other."""
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__)]
    marked = {path.relative_to(ROOT).as_posix() for path in files if "pytest.mark.gpu" in path.read_text()}
    assert marked == FILES


def test_every_benchmark_has_a_row() -> None:
    assert len(COMMANDS) >= 7
    rows = re.findall(r"^\| `(\w+\.py)` \|", PAGE, re.MULTILINE)
    assert [f"benchmarks/{name}" for name in rows] == [path for path, _ in COMMANDS]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(("path", "options"), COMMANDS)
def test_without_a_gpu_a_benchmark_for_one_says_so(path: str, options: str) -> None:
    command = [sys.executable, path, *options.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "finds no GPU here" in done.stderr


@pytest.mark.slow
def test_the_page_counts_the_tests() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", *sorted(FILES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    (count,) = re.findall(r"^(\d+)/\d+ tests collected", done.stdout, re.MULTILINE)
    assert f"{count} passed with two GPUs" in PAGE
    assert f"all {count} are skipped" in PAGE
