"""What sentences are made of: the first few of a list and how many more there are, ranks, kinds of values."""

import difflib
import re
from collections.abc import Collection, Sequence


def listed(items: Sequence[object], most: int = 8, between: str = ", ") -> str:
    """`"a, b, c and 4 more"`, with at most `most` of them by name; an empty name is the root module's."""
    shown = between.join(str(item) or "the root" for item in items[:most])
    return f"{shown} and {len(items) - most} more" if len(items) > most else shown


def ranks_named(ranks: Sequence[int]) -> str:
    """`"rank 3"`, or `"ranks 0, 1 and 5 more"`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)}"


def kind_in_words(value: object) -> str:
    """The kind of an argument of a wrong type, which tells a class from its instances."""
    return f"the class {value.__name__} itself" if isinstance(value, type) else type(value).__name__


def human_bytes(count: int) -> str:
    """A number of bytes for people: "1.5 MiB"."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


HINTS = 8
"""How many of several unknown names get a near miss: to find one, all names are compared."""


def near_miss(name: str, candidates: Collection[str]) -> str:
    """The sentence "Did you mean 'x'?" for the closest candidate, with a space before it, or nothing.

    The shortest candidate that has all words of the name comes first: "num_hidden_layers" for "num_layers".
    """
    words = set(re.split(r"[._]", name))
    longer = [one for one in candidates if len(words) > 1 and words < set(re.split(r"[._]", one))]
    close = sorted(longer, key=lambda one: (len(one), one)) or difflib.get_close_matches(
        name, candidates, n=1, cutoff=0.5
    )
    close = close or [one for one in candidates if one.lower() == name.lower()]
    return f" Did you mean {close[0]!r}?" if close else ""


def unknown_strategy(name: str, known: Collection[str]) -> str:
    """What is said about the name of a strategy that does not exist."""
    return f"There is no strategy {name!r}; valid names: {', '.join(sorted(known))}.{near_miss(name, known)}"


def dtype_name(dtype: object) -> str:
    """A dtype's name without "torch."."""
    return str(dtype).removeprefix("torch.")
