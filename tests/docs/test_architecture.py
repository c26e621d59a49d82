"""The floors of the house: the contracts hold, and the page shows what the imports say."""

import ast
import runpy
import subprocess
import sys
from collections import Counter
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


def _sources() -> dict[Path, str]:
    return {path: path.read_text() for path in (ROOT / "composer_dist").rglob("*.py")}


def test_a_class_name_stands_once() -> None:
    names = Counter(
        node.name.lstrip("_")
        for text in _sources().values()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_files_and_folders_stay_small() -> None:
    sources = _sources()
    assert [str(path) for path, text in sources.items() if text.count("\n") > 350] == []
    folders = Counter(path.parent for path in sources if path.name != "__init__.py")
    assert [str(folder) for folder, count in folders.items() if count > 16] == []
