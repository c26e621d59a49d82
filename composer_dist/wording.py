"""What sentences are made of: the first few of a list and how many more there are, ranks, kinds of values."""

from __future__ import annotations

from collections.abc import Sequence


def listed(items: Sequence[object], most: int = 8) -> str:
    """`"a, b, c and 4 more"`, with at most `most` of them by name; an empty name is the root module's."""
    shown = ", ".join(str(item) or "the root" for item in items[:most])
    return f"{shown} and {len(items) - most} more" if len(items) > most else shown


def ranks_named(ranks: Sequence[int]) -> str:
    """`"rank 3"`, or `"ranks 0, 1 and 5 more"`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)}"


def kind_in_words(value: object) -> str:
    """What an argument of a wrong type is, for the error: a class itself is told from its instances."""
    return f"the class {value.__name__} itself" if isinstance(value, type) else type(value).__name__
