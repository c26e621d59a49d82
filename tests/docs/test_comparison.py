"""The page that compares libraries: every cell leads to its evidence."""

import importlib.metadata
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.promise(141)
DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "comparison.md").read_text()
LINKS = dict(re.findall(r"^\[(\w+)\]: (https://\S+)$", PAGE, re.MULTILINE))
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| |")
]
INSTALLED = {
    "https://github.com/Lightning-AI/pytorch-lightning/blob/{}/src/": "lightning",
    "https://github.com/huggingface/accelerate/blob/v{}/src/": "accelerate",
    "https://github.com/huggingface/transformers/blob/v{}/src/": "transformers",
}


def test_every_cell_of_another_library_leads_to_a_fixed_version() -> None:
    used = []
    assert len(ROWS) > 15
    for name, _, *others in ROWS:
        assert len(others) == 8, name
        for cell in others:
            found = re.fullmatch(r"\[([^\]]+)\]\[(\w+)\]", cell)
            assert found, f"{name}: {cell}"
            used.append(found[2])
    assert set(used) == set(LINKS)
    for url in LINKS.values():
        assert re.search(
            r"/blob/(v?\d+\.\d+\.\d+|[0-9a-f]{40})/|^https://pypi.org/project/\w+/[\d.]+/$", url
        ), url


def test_every_cell_of_ours_leads_to_a_page_and_its_promises() -> None:
    promises = set(re.findall(r"^- \*\*(\d+)\*\*", (DOCS / "promises.md").read_text(), re.MULTILINE))
    for name, ours, *_ in ROWS:
        ((page, numbers),) = re.findall(r"\]\(([\w/]+\.md)(?:#[\w-]+)?\)((?:, \d+)*)", ours)
        assert (DOCS / page).exists(), name
        assert set(re.findall(r"\d+", numbers)) <= promises, name


@pytest.mark.parametrize("base", INSTALLED)
def test_files_of_installed_libraries_are_there(base: str) -> None:
    library = INSTALLED[base]
    if (spec := find_spec(library)) is None or spec.origin is None:
        pytest.skip(f"{library} is not installed")
    prefix = base.format(importlib.metadata.version(library))
    paths = [url.removeprefix(prefix) for url in LINKS.values() if url.startswith(prefix)]
    if not paths:
        pytest.skip(f"another version of {library} was read than is installed")
    root = Path(spec.origin).parents[1]
    assert [path for path in paths if not (root / path).exists()] == []
