"""Which variants of a test the default run tries; the others are `slow`, and `make test-all` tries all.

The default run has each value of each axis at least once, and the combinations that meet in a branch.
"""

from collections.abc import Iterable
from typing import Any

import pytest


def slow(*values: Any, **options: Any) -> Any:
    """A variant for `parametrize` that the default run leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow, **options)


def in_the_default_run(*chosen: Any, among: Iterable[Any]) -> list[Any]:
    """All variants for `parametrize`, of which the default run has the chosen ones."""
    every = list(among)
    if unknown := [one for one in chosen if one not in every]:
        raise ValueError(f"{unknown} are not among {every}")
    return [one if one in chosen else slow(*(one if isinstance(one, tuple) else (one,))) for one in every]
