"""The scripts of the migration guides: with the other library and with this one they lose the same."""

import ast
import importlib.util
import re
import runpy
import warnings
from pathlib import Path

import pytest

from tests.kit.world import World

pytestmark = [
    pytest.mark.promise(141),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
]
ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "migration"
NEEDS = {
    "composer": None,
    "torchtune": None,
    "finetuning_scheduler": None,
    "fabric": "lightning",
    "accelerate": "accelerate",
    "transformers": "transformers",
}
"""What a script with composer_dist needs besides it."""
OTHERS = {one: NEEDS[one] or one for one in NEEDS}
SLOW = pytest.mark.slow


def losses(name: str, which: str) -> list[float]:
    """What a script returns; other libraries may warn."""
    with warnings.catch_warnings():
        if which == "before":
            warnings.simplefilter("ignore")
        found: list[float] = runpy.run_path(str(SCRIPTS / name / f"{which}.py"))["main"]()
    return found


def ran(world: World, name: str, which: str) -> list[list[float]]:
    return world(losses, name, which, setup="environment", timeout=180)


@pytest.mark.parametrize("name", [pytest.param(one, marks=[SLOW] * bool(NEEDS[one])) for one in NEEDS])
def test_it_trains_as_with_the_other_library(world1: World, world2: World, name: str) -> None:
    world = world1 if name == "finetuning_scheduler" else world2
    if (needed := NEEDS[name]) is not None:
        pytest.importorskip(needed, reason=f"the script trains with {needed}")
    ours = ran(world, name, "after")
    assert all(len(rank) > 3 for rank in ours)
    if importlib.util.find_spec(OTHERS[name]) is not None:
        assert ran(world, name, "before") == [pytest.approx(rank, rel=1e-4) for rank in ours]


@pytest.mark.parametrize("name", NEEDS)
def test_the_guide_shows_both_scripts(name: str) -> None:
    page = (ROOT / "docs" / "migration" / f"{name}.md").read_text()
    shown = re.findall(r'^```python title="(\w+)\.py"\n--8<-- "(.+)"\n```$', page, re.MULTILINE)
    assert shown == [(which, f"examples/migration/{name}/{which}.py") for which in ("before", "after")]


@pytest.mark.parametrize("name", NEEDS)
def test_the_script_before_knows_nothing_of_this_library(name: str) -> None:
    text = (SCRIPTS / name / "before.py").read_text()
    modules = {node.module for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)}
    assert not any(str(module).startswith("composer_dist") for module in modules)
    assert compile(text, name, "exec")
