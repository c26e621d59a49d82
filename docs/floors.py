"""Draws the floors of the house from the imports of the code, for `docs/architecture.md`.

`python docs/floors.py` prints the drawing, `python docs/floors.py --write` puts it into the page. Each
package stands as low as its imports allow: one floor above the highest package that it imports.
"""

import sys
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

PAGE = Path(__file__).with_name("architecture.md")
BEGIN, END = "<!-- floors: begin (make floors) -->\n", "<!-- floors: end -->\n"


def floors() -> list[list[str]]:
    """The packages of each floor, the highest floor first."""
    graph = grimp.build_graph("composer_dist")
    inside = graph.find_children("composer_dist.distributed")
    packages = (graph.find_children("composer_dist") - {"composer_dist.distributed"}) | inside
    for package in packages:
        graph.squash_module(package)

    below = {one: graph.find_modules_directly_imported_by(one) & packages - {one} for one in packages}
    floor: dict[str, int] = {}
    for package in TopologicalSorter(below).static_order():  # refuses circles by name
        floor[package] = max((floor[one] + 1 for one in below[package]), default=0)
    rows = range(max(floor.values()), -1, -1)
    return [sorted(package for package in packages if floor[package] == row) for row in rows]


def drawing() -> str:
    """One line a floor; packages inside `distributed/` with a slash in front."""
    rows = floors()
    lines = []
    for number, packages in enumerate(rows):
        names = [one.removeprefix("composer_dist.").replace("distributed.", "/") for one in packages]
        lines.append(f"{len(rows) - number - 1:>2}  {'  '.join(names)}")
    return "```text\n" + "\n".join(lines) + "\n```\n"


def page(text: str) -> str:
    """The page with a new drawing."""
    head, rest = text.split(BEGIN)
    return head + BEGIN + drawing() + END + rest.split(END)[1]


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page(PAGE.read_text()))
    else:
        print(drawing(), end="")
