"""Tables for a terminal or a log file, and what goes into the table of a plan's units."""

import io
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from composer_dist.distributed.sharding.plan import Unit
from composer_dist.wording import human_bytes

_WIDTH = 110
"""Columns where there is no terminal."""


def table(title: str, headings: Mapping[str, str], rows: Iterable[Sequence[str]]) -> str:
    """A table as text; each heading has "left" or "right" for its column, and empty headings are hidden."""
    from rich.console import Console  # slow to import
    from rich.table import Table

    made = Table(title=title, show_header=any(heading.strip() for heading in headings))
    for heading, side in headings.items():
        style = None if heading.strip() or side == "right" else "bold"
        made.add_column(heading, justify=side, style=style, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        made.add_row(*row)
    file = io.StringIO()
    Console(file=file, width=width(), color_system=None).print(made)
    return file.getvalue().rstrip()


def width() -> int:
    """The columns of the terminal, on standard error or standard output."""
    for stream in (sys.stderr, sys.stdout):
        with suppress(OSError, ValueError, AttributeError):  # not a terminal, closed, or none at all
            return os.get_terminal_size(stream.fileno()).columns or _WIDTH
    return _WIDTH


def mesh_in_words(sizes: Mapping[str, int]) -> str:
    """The dimensions of a mesh that have several ranks; empty if none has."""
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)


def unit_rows(units: Sequence[Unit]) -> tuple[dict[str, str], list[list[str]]]:
    """Headings and rows of the table of units; units that differ only in numbers share a row."""
    alike: dict[tuple[str, int, int, bool | int, str], list[Unit]] = {}
    for unit in units:
        pattern = re.sub(r"\d+", "*", unit.name)
        key = (pattern, len(unit.parameters), unit.nbytes, unit.reshard_after_forward, unit.reason)
        alike.setdefault(key, []).append(unit)
    headings = {"unit": "left", "tensors": "right", "size": "right", "reshard": "left", "reason": "left"}
    rows = []
    for (pattern, count, nbytes, reshard, reason), members in alike.items():
        name = f"{pattern} ({len(members)} units)" if len(members) > 1 else members[0].name or "(root)"
        rows.append([name, str(count), human_bytes(nbytes), str(reshard), reason])
    return headings, rows
