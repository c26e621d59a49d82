"""docs/compatibility.md and docs/install.md say what pyproject.toml and CI say."""

import re
import tomllib
from pathlib import Path

import yaml

import composer_dist

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
POLICY = (ROOT / "docs/compatibility.md").read_text()
INSTALL = (ROOT / "docs/install.md").read_text()
CI = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())


def bounds(name: str) -> tuple[str, str]:
    """The lower and the upper bound of a dependency, the upper one exclusive."""
    (wanted,) = [one for one in PROJECT["project"]["dependencies"] if re.match(rf"{name}\W", one)]
    low, high = re.search(r">=([\d.]+)(?:,<([\d.]+))?", wanted).groups()  # type: ignore[union-attr]
    return low, high


def row(name: str) -> str:
    (line,) = re.findall(rf"^\| {name} \|.*$", POLICY, re.MULTILINE)
    return line


def test_the_ranges_are_those_of_the_project() -> None:
    low, high = bounds("torch")
    major, minor = high.split(".")
    newest = f"{major}.{int(minor) - 1}"
    assert f"{low} to {newest}" in row("torch")
    assert f"torch {low} to {newest}" in INSTALL
    assert f"| torch | [{low} to {newest}]" in (ROOT / "docs/comparison.md").read_text()
    assert f"{bounds('transformers')[0]} to" in row("transformers")
    assert bounds("peft")[0] in row("peft")
    extras = PROJECT["project"]["optional-dependencies"]
    for name, extra in (("lightning", "lightning"), ("accelerate", "accelerate"), ("TRL", "trl")):
        assert extras[extra][0].partition(">=")[2] in row(name)
    assert PROJECT["project"]["requires-python"] == ">=3.11"


def test_ci_tests_what_the_page_says() -> None:
    matrix = CI["jobs"]["tests"]["strategy"]["matrix"]
    more = matrix["include"]
    assert ", ".join(matrix["torch"]) in row("torch")
    pythons = [*matrix["python"], *(one["python"] for one in more)]
    assert ", ".join(pythons) in row("Python")
    classifiers = PROJECT["project"]["classifiers"]
    assert [one for one in classifiers if one.startswith("Programming Language :: Python :: 3.")] == [
        f"Programming Language :: Python :: {version}" for version in pythons
    ]


def test_every_extra_is_in_the_table() -> None:
    named = re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", INSTALL, re.MULTILINE)
    extras = PROJECT["project"]["optional-dependencies"]
    assert [name for name, _ in named] == list(extras)
    for name, packages in named:
        if name != "dev":
            found = [re.match(r"[\w-]+", one)[0] for one in extras[name]]  # type: ignore[index]
            assert packages.split(", ") == found


def test_the_version_has_one_source() -> None:
    assert PROJECT["project"]["dynamic"] == ["version", "urls"]
    assert PROJECT["tool"]["hatch"]["version"] == {"path": "composer_dist/__init__.py"}
    assert composer_dist.__version__ in POLICY
