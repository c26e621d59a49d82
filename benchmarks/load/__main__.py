"""Many modules, parameters, ranks and rules, and a large tensor: does it work, and is it linear?

    python -m benchmarks.load --write

Each world runs in fresh processes on gloo, forked from one that has the imports done, so that 64 ranks fit
into the memory of one host. Prints Markdown, and puts it into docs/reliability.md with `--write`. A cell has
the seconds of the slowest rank, the seconds of processor time of all ranks together, and the most memory
that a rank needed in addition to what it held before. "growth" is the factor from each size to the next, of
processor time and of memory; the heading has that of the sizes.
"""

import argparse
import importlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.load.worlds import STRUCK, Measured, failing, modules, parameters, ranks, rules, tensor
from tests.kit.forked import Outcome, as_script, outcomes

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- load: begin (python -m benchmarks.load --write) -->\n", "<!-- load: end -->\n"
LIMIT = 1800.0
"""Seconds for a world."""
PRELOAD = (
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.tensor.parallel",
    "transformers.modeling_layers",
)


class Part(NamedTuple):
    """Worlds of growing sizes."""

    title: str
    body: Callable[[Path, int], Measured]
    sizes: tuple[int, ...]
    ranks: int | None = 2
    """None: the size is the number of ranks."""


PARTS = {
    "modules": Part(
        "Modules, each with a matrix and a bias, in 10 units",
        partial(modules, every=False),
        (1000, 3000, 10000),
    ),
    "units": Part("Modules, each of which is a unit", partial(modules, every=True), (1000, 3000, 10000)),
    "parameters": Part("Parameters of 4 x 2, in 10 units", parameters, (10000, 30000, 100000)),
    "tensor": Part("One tensor, in MB", tensor, (300, 1000, 3000)),
    "ranks": Part("Ranks; 20 layers of width 64, AdamW", ranks, (4, 16, 64), None),
    "rules": Part("Rules, for 10,000 layers; planning only, in one process", rules, (10, 100, 1000), 1),
}


def run(body: Callable[[Path], Measured]) -> Callable[[Path], None]:
    """What a rank does."""

    def on_rank(folder: Path) -> None:
        found = body(folder)
        if os.environ["RANK"] == "0":
            print(f"RESULT {json.dumps(found)}", flush=True)

    return on_rank


def measured(part: Part, size: int) -> Measured:
    world = part.ranks or size
    body = run(lambda folder: part.body(folder, size))
    ((_, outcome),) = outcomes([("", body, world)], lambda folder: [], LIMIT)
    line = next((line for line in outcome.ranks[0].text.splitlines() if line.startswith("RESULT ")), None)
    if line is None or any(rank.status for rank in outcome.ranks) or outcome.left:
        text = "\n".join(f"--- rank {n}: {one.status}\n{one.text}" for n, one in enumerate(outcome.ranks))
        raise SystemExit(f"{part.title}, {size}: {outcome.left}\n{text}")
    result: Measured = json.loads(line[7:])
    return result


def cell(figures: dict[str, float]) -> str:
    return (
        f"{figures['seconds']:.2f} s, {figures['processor s']:.2f} s, {max(figures['extra MiB'], 0):.0f} MiB"
    )


def growth(sizes: Sequence[dict[str, float]]) -> str:
    """The factors between neighbors."""

    def factors(key: str, least: float) -> str:
        pairs = pairwise(sizes)
        return " ".join(f"x{max(b[key], least) / max(a[key], least):.1f}" for a, b in pairs)

    return f"{factors('processor s', 0.01)}; {factors('extra MiB', 1.0)}"


def table(part: Part, found: dict[int, Measured]) -> Iterator[str]:
    steps = " ".join(f"x{b / a:.3g}" for a, b in pairwise(part.sizes))
    yield f"| {part.title} | {' | '.join(f'{size:,}' for size in found)} | growth ({steps}) |"
    yield "|---" * (2 + len(found)) + "|"
    for name in next(iter(found.values())):
        rows = [one[name] for one in found.values()]
        if "seconds" in rows[0]:
            yield f"| {name} | {' | '.join(map(cell, rows))} | {growth(rows)} |"
        else:
            for key in rows[0]:
                yield f"| {key} | {' | '.join(f'{row[key]:.4g}' for row in rows)} | |"


def failures(size: int) -> Iterator[str]:
    """How worlds end in which a rank fails."""
    yield f"| rank {STRUCK} of {size}, while preparing | seconds until all have ended | ranks that name it |"
    yield "|---|---|---|"
    for kind in ("raise", "SIGKILL"):
        body = run(partial(failing, size=size, kind=kind))
        ((_, outcome),) = outcomes([("", body, size)], lambda folder: [], 120.0)
        yield f"| {kind} | {ended(outcome)} | {named(outcome)} of {size - (kind == 'SIGKILL')} |"


def ended(outcome: Outcome) -> str:
    if hanging := [rank for rank, one in enumerate(outcome.ranks) if one.status is None]:
        return f"never: {hanging}"
    struck, last = outcome.ranks[STRUCK].seconds, max(one.seconds for one in outcome.ranks)
    return f"{last - struck:.1f} after rank {STRUCK} has, {last:.1f} since the start"


def named(outcome: Outcome) -> int:
    return sum(bool(re.search(rf"(?i)\branks? {STRUCK}\b", one.text)) for one in outcome.ranks)


def main() -> None:
    """Run the parts and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=[*PARTS, "failures"], default=[*PARTS, "failures"])
    parser.add_argument("--sizes", nargs="+", type=int, help="instead of those of the parts")
    parser.add_argument("--write", action="store_true", help="into docs/reliability.md")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for module in PRELOAD:
        importlib.import_module(module)
    tables = []
    for name in given.only:
        if name == "failures":
            lines = list(failures(64))
        else:
            part = PARTS[name]._replace(**({"sizes": tuple(given.sizes)} if given.sizes else {}))
            found = {}
            for size in part.sizes:
                found[size] = measured(part, size)
                print(name, size, json.dumps(found[size]), flush=True)
            lines = list(table(part, found))
        print("\n".join(lines), f"\nload {os.getloadavg()[0]:.1f}\n", flush=True)
        tables.append("\n".join(lines))
    if given.write:
        head, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(head + BEGIN + "\n\n".join(tables) + "\n" + END + rest.split(END)[1])


if __name__ == "__main__":
    as_script(main)
