"""Which variants of a test the default run tries; the others are `slow`, and `make test-all` tries all.

The default run has each value of each axis at least once, and the combinations that meet in a branch.
"""

import itertools
from collections.abc import Iterable, Mapping
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


_WITH_MARKS = type(pytest.param())


def crossed(axes: Mapping[str, Iterable[Any]]) -> Any:
    """`parametrize` by all combinations of these axes, of which the default run has each value at least once.

    Args:
        axes: the values by name; by several names (`"ranks, replicas"`) tuples of values.
    """
    every = [list(values) for values in axes.values()]
    longest = max(map(len, every))
    chosen = {tuple(number % len(values) for values in every) for number in range(longest)}
    variants = []
    for places in itertools.product(*(range(len(values)) for values in every)):
        found: list[Any] = []
        marks = [] if places in chosen else [pytest.mark.slow]
        for names, values, place in zip(axes, every, places, strict=True):
            one = values[place]
            if isinstance(one, _WITH_MARKS):
                found += one.values
                marks += one.marks
            else:
                found += one if "," in names else [one]
        variants.append(pytest.param(*found, marks=marks))
    return pytest.mark.parametrize(", ".join(axes), variants)
