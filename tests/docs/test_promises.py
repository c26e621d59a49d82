"""The list of promises and the tests that hold them."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def marked(path: Path) -> set[int]:
    """The numbers of all promise marks in a file."""
    numbers = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.promise":
            numbers |= {ast.literal_eval(argument) for argument in node.args}
    return numbers


def test_every_promise_has_a_test_and_every_mark_a_promise() -> None:
    listed = [int(n) for n in re.findall(r"^- \*\*(\d+)\*\*", (ROOT / "docs/promises.md").read_text(), re.M)]
    assert len(listed) == len(set(listed))
    assert set.union(*map(marked, (ROOT / "tests").rglob("test_*.py"))) == set(listed)


@pytest.mark.slow
def test_the_tests_of_one_promise_can_be_chosen() -> None:
    options = ["--collect-only", "-q", "-m", "", "--promise", "2", "tests/distributed/mesh/test_mesh.py"]
    command = [sys.executable, "-m", "pytest", *options]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = [line.partition("::")[2] for line in found.splitlines() if "::" in line]
    assert names == ["test_a_mesh_needs_a_process_group"]
