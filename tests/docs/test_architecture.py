"""The floors of the house: the contracts hold, and the page shows what the imports say."""

import runpy
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_package_imports_only_from_floors_below_it() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_page_shows_the_floors_as_they_are() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "floors.py"))["page"]
    text = (ROOT / "docs" / "architecture.md").read_text()
    assert page(text) == text, "run `make floors`"
