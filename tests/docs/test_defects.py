"""The defects that attack has found: their tests exist and hold the promises that the table names."""

import re
import tomllib
from pathlib import Path

import pytest

from tests.docs.test_promises import marked

pytestmark = pytest.mark.promise(110)

ROOT = Path(__file__).parents[2]
NUMBERS = [
    f"{kind}{n}" for kind, last in zip("ABCD", (20, 6, 8, 20), strict=True) for n in range(1, last + 1)
]


def test_every_defect_has_tests_of_its_promises() -> None:
    page = (ROOT / "docs/reliability.md").read_text()
    rows = re.findall(r"^\| ([A-D]\d+) \| .+ \| ([\d, ]+) \| (.+) \|$", page, re.M)
    assert [number for number, *_ in rows] == NUMBERS
    for number, promises, files in rows:
        names = re.findall(r"`([^`]+)`", files)
        assert all(name.endswith(".py") for name in names), number
        numbers = set.union(*(marked(ROOT / "tests" / name) for name in names))
        assert {int(one) for one in promises.split(", ")} <= numbers, (
            f"{number}: no test of {names} is marked so"
        )


def test_the_versions_of_torch_that_were_run_are_those_that_are_allowed() -> None:
    page = (ROOT / "docs/versions.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (pin,) = (one for one in project["dependencies"] if one.startswith("torch>"))
    run = {int(minor) for minor in re.findall(r"^\| 2\.(\d+)\.\d+ \|.*\d+ passed", page, re.M)}
    assert pin == f"torch>=2.{min(run)},<2.{max(run) + 1}"
    assert run == set(range(min(run), max(run) + 1))
    assert f"torch 2.{min(run)} to 2.{max(run)}" in page
    assert re.search(r"^torch==2\.(\d+)\.", (ROOT / "constraints.txt").read_text(), re.M)
