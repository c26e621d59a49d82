"""The reference in the checkout is what the docstrings say."""

import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.promise(110)

DOCS = Path(__file__).parents[2] / "docs"


def test_the_reference_is_up_to_date_and_readable() -> None:
    signatures = runpy.run_path(str(DOCS / "signatures.py"))
    assert signatures["SCHEMA"].read_text() == signatures["current"](signatures["SCHEMA"])
    for file in sorted((DOCS / "reference").glob("*.md")):
        text = file.read_text()
        assert signatures["page"](text) == text, f"{file.name}: run `make reference`"
        assert ":::" not in text
    assert (
        "| `batch_size` | int | `8` | Samples in a step across all ranks: results"
        in (DOCS / "reference" / "runs.md").read_text()
    )
