"""Links between the pages that are not part of the site lead somewhere; `make docs` checks the site's own."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(path.name for path in ROOT.glob("*.md"))


def anchors(page: Path) -> set[str]:
    """The headings of a page, as GitHub and mkdocs name them in addresses."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]*)(?:#[^)]*)?\)", text):
        assert (ROOT / (target or page)).exists(), target
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]*)\)", text):
        assert anchor in anchors(ROOT / (target or page)), f"{target}#{anchor}"
