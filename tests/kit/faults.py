"""Faults for one rank at one step of a run, and what is promised of the worlds in which they are tried.

`python -m tests.kit.faults --write` tries the cells of docs/reliability.md (`make chaos`); `--steps`,
`--kinds` and `--ranks` choose others.
"""

import argparse
import ctypes
import gc
import importlib
import itertools
import math
import os
import random
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tests.kit.forked import Outcome, as_script, outcomes

LIMIT = 60.0
"""Seconds in which every rank has to end."""
HANG = 8.0
"""The limit of a `HangGuard`, in seconds."""
ARRIVAL = 10.0
"""Seconds in which a rank has to come to the process group, at the step "join"."""
PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- chaos: begin (make chaos) -->\n", "<!-- chaos: end -->\n"


class Fault(NamedTuple):
    """What happens to a rank, once, at a step of its run."""

    rank: int
    step: str
    kind: str
    ranks: int = 2
    """Of the world."""


class StruckError(Exception):
    """Raised by a fault, as by the user's own code."""


@dataclass(frozen=True)
class Step:
    """Where `tests.kit.scripts.struck` is struck."""

    part: Literal["prepare", "train", "save", "load", "export"]
    label: str
    at: str = ""
    """A function of the product which is struck when it is called; "" if the script itself is struck."""
    says: str = ""
    """A regular expression for how errors name it."""


_BATCH = r"batch \d"
_SETUP = "set-up|'the plan|sharding|initiali|deliver|the mesh|final checks|the values|replication"
_SAVE = "checkpoint|sav(e|ing)|copying to host"
_LOAD = "load|resum|checkpoint|delivery|matching"
_EXPORT = "export|shards|files|director|gather"
STEPS = {
    "join": Step("prepare", "before the process group", says="arrive|reach|answer|process group|store"),
    "plan": Step("prepare", "the plan", "distributed.prepare.build_plan", _SETUP),
    "sources": Step("prepare", "comparing plans", "distributed.prepare.decide_sources", _SETUP),
    "shard": Step("prepare", "sharding", "distributed.prepare.divide", _SETUP),
    "initialize": Step("prepare", "initializing weights", says=_SETUP),
    "deliver": Step("prepare", "delivering weights", "distributed.moving.transport.deliver", _SETUP),
    "check": Step("prepare", "final checks", "distributed.prepare.sharding.finish", _SETUP),
    "before_dataloader": Step("train", "before the data", says=_BATCH),
    "data": Step("train", "reading a sample", says=f"{_BATCH}|fetching a batch"),
    "worker": Step("train", "in a data worker", says=f"{_BATCH}|fetching a batch"),
    "before_forward": Step("train", "before the forward", says=_BATCH),
    "forward": Step("train", "in the forward", says=_BATCH),
    "before_backward": Step("train", "before the backward", says=_BATCH),
    "backward": Step("train", "in the backward", says=_BATCH),
    "clip": Step("train", "clipping", "trainer.step.clip_grad_norm", _BATCH),
    "step": Step("train", "the optimizer step", says=_BATCH),
    "batch_end": Step("train", "the end of a batch", says=_BATCH),
    "eval_batch_start": Step("train", "evaluation", says="evaluation"),
    "metric": Step("train", "in a metric", says="evaluation|metrics"),
    "state_dict": Step("save", "planning a save", says=_SAVE),
    "write": Step("save", "writing a checkpoint", "checkpoint.format.sharded.Saving._write", _SAVE),
    "background": Step(
        "save", "writing in the background", "checkpoint.format.sharded.Saving._write", f"{_SAVE}|{_BATCH}"
    ),
    "open": Step("load", "opening a checkpoint", "checkpoint.load.open_checkpoint", _LOAD),
    "read": Step("load", "reading tensors", "checkpoint.kinds.model.fill_tensors", _LOAD),
    "load_state_dict": Step("load", "loading a callback's state", says=_LOAD),
    "gather": Step("export", "gathering a state", "checkpoint.gather.full_tensors", _EXPORT),
    "export": Step("export", "writing a model", "checkpoint.export.weights.Export.write", _EXPORT),
    "undo": Step("export", "undoing a preparation", "distributed.undo._end", "features|whole|undo|modules"),
}
UNTOUCHED = ("join", "plan", "sources")
"""Steps at which a model is as before when they fail."""


def _raise() -> None:
    raise StruckError("struck")


def _stall() -> None:
    while True:
        time.sleep(1)


def _exhaust_memory() -> None:
    """No address is left to this process but for a little, and more is asked for."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    room = pages * resource.getpagesize() + (64 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (room, resource.getrlimit(resource.RLIMIT_AS)[1]))
    bytearray(1 << 33)


def _fill_disk(folder: Path) -> None:
    with (folder / "disk" / "ballast").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 12))
        except OSError:
            return


class Kind(NamedTuple):
    """What happens, and how the others may say it."""

    strike: Callable[..., Any] | None
    """None: the rank is given something else from the start."""
    says: str
    steps: tuple[str, ...] = tuple(STEPS)
    """Where it may happen."""


_WORKER = "worker"
_PLAN = ("plan",)
KINDS = {
    "raise": Kind(_raise, "StruckError: struck"),
    "SIGKILL": Kind(
        lambda: os.kill(os.getpid(), signal.SIGKILL), "ended|died|exited unexpectedly|SIGKILL|by signal"
    ),
    "exit(0)": Kind(lambda: os._exit(0), "ended|died|exited unexpectedly"),
    "memory": Kind(_exhaust_memory, "memory"),
    "stall": Kind(_stall, "is still in|did not answer|waits for data|arrive"),
    "SIGSTOP": Kind(
        lambda: os.kill(os.getpid(), signal.SIGSTOP), "is stopped|not answer|waits for data|arrive"
    ),
    "GIL": Kind(lambda: ctypes.PyDLL(None).sleep(10_000), "is blocked|did not answer|waits for data|arrive"),
    "disk": Kind(_fill_disk, "No space left", ("state_dict", "write", "background", "export")),
    "config": Kind(None, "different configuration|different meshes", _PLAN),
    "model": Kind(None, "different model", _PLAN),
    "seed": Kind(None, "different values", _PLAN),
    "file": Kind(None, "different (checkpoints|files|weights)|differ", ("plan", "open")),
    "torch": Kind(None, "different versions of torch", _PLAN),
}
SLOW = ("stall", "SIGSTOP", "GIL")
"""Noticed after a while, by a `HangGuard`."""
_RAW = re.compile(
    r"third_party/gloo|Connection (?:closed|reset)|Broken pipe|SocketImpl|recvValue|Dist\w+Error|"
    r"TCPStore|socket\.cpp|Exception (?:raised from|in thread)|frame #\d"
)
"""The text of torch's own libraries, which says nothing to a user."""


def cells(steps: Iterable[str], kinds: Iterable[str], ranks: Iterable[int]) -> Iterator[Fault]:
    """Every step with every kind on every rank."""
    for step, kind, rank in itertools.product(steps, kinds, ranks):
        if step in KINDS[kind].steps:
            yield Fault(rank, step, kind)


def table_cells() -> list[Fault]:
    """Those of `make chaos`: every step with every kind, the kinds that say the most on both ranks."""
    both = ("raise", "SIGKILL", "disk", "config", "model", "seed", "file", "torch")
    found = list(cells(STEPS, both, (0, 1)))
    for number, step in enumerate(STEPS):
        hang = ("SIGSTOP", "GIL")[number // 2 % 2]
        found += [
            Fault((number + turn) % 2, step, kind)
            for turn, kind in enumerate(("exit(0)", "memory", "stall", hang))
        ]
    three = ("sources", "raise"), ("before_forward", "raise"), ("backward", "SIGKILL"), ("write", "exit(0)")
    found += [Fault(rank, step, kind, 3) for step, kind in three for rank in (0, 1, 2)]
    random.Random(0).shuffle(found)  # a part of them is a sample
    return found


def quick_cells() -> list[Fault]:
    """A tenth of `table_cells` for the default tests: what ends at once, and a hang of the store's rank."""
    at_once = [one for one in table_cells() if one.kind not in SLOW and one.step != "join" and one.ranks == 2]
    return [Fault(0, "before_forward", "SIGSTOP"), *at_once[: len(table_cells()) // 10]]


def tried(faults: Iterable[Fault], at_once: int = 1) -> Iterator[tuple[Fault, Outcome, list[str]]]:
    """Try faults; yields how each world has ended, and what is wrong with that."""
    from tests.kit.scripts.struck import PRELOAD, look, struck

    for module in PRELOAD:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a rank would copy the pages of all that it was forked with
    worlds = ((one, partial(struck, fault=one), one.ranks) for one in faults)
    for fault, outcome in outcomes(worlds, look, LIMIT, at_once):
        yield fault, outcome, wrong(fault, outcome)


def wrong(fault: Fault, outcome: Outcome) -> list[str]:
    """What is not as promised."""
    found = [f"{one} stays" for one in outcome.left]
    for rank, one in enumerate(outcome.ranks):
        if one.status is None:
            found.append(f"rank {rank} hangs")
            continue
        if raw := _RAW.search(one.text):
            found.append(f"rank {rank} prints {raw[0]!r}")
        if rank == fault.rank and _dies(fault):
            continue
        if one.status == 0:
            found.append(f"rank {rank} ends with {one.status}")
        found += [f"rank {rank} does not name the {what}" for what in _unnamed(fault, rank, one.text)]
        if "TOUCHED" in one.text:
            found.append(f"rank {rank} has changed the model")
    return found


def _dies(fault: Fault) -> bool:
    """Whether the rank itself cannot say anything."""
    return fault.kind in ("SIGKILL", "exit(0)", "SIGSTOP", "GIL") and fault.step != _WORKER


def _unnamed(fault: Fault, rank: int, text: str) -> Iterator[str]:
    if fault.kind == "disk":  # of all ranks alike
        yield from () if KINDS["disk"].says in text else ("cause",)
        return
    ranks = rf"(?i)\branks? (\d, )*{fault.rank}\b"
    if KINDS[fault.kind].strike is None:
        ranks = r"(?i)\branks?\b"
    early = fault.step == "join" and rank == fault.rank  # it is the script that fails
    if not early and not re.search(ranks, text):
        yield "rank"
    if not early and not re.search(STEPS[fault.step].says, text):
        yield "step"
    late = fault.step == "join" and rank != fault.rank
    if not re.search("arrive|did not open" if late else KINDS[fault.kind].says, text):
        yield "cause"


def main() -> None:
    """Try cells and print them; `--write` puts the table of all into the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", nargs="*", default=list(STEPS))
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--ranks", nargs="*", type=int, default=[0, 1])
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="those of the default tests")
    parser.add_argument("--write", action="store_true", help="those of the table, into the page")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no cell is begun")
    parser.add_argument("--show", action="store_true", help="what the ranks have printed")
    given = parser.parse_args()
    chosen = list(cells(given.steps, given.kinds, given.ranks))
    chosen = table_cells() if given.write else quick_cells() if given.quick else chosen
    began, results, cpu = time.monotonic(), dict[Fault, tuple[Outcome, list[str]]](), 0.0
    begun = itertools.takewhile(lambda _: time.monotonic() - began < given.seconds, chosen)
    for fault, outcome, found in tried(begun, given.at_once):
        results[fault], cpu = (outcome, found), cpu + outcome.cpu
        print(f"{named(fault)}: {'; '.join(found) or 'ok'} ({outcome.seconds:.1f} s)", flush=True)
        if given.show or (found and not given.write):
            for rank, one in enumerate(outcome.ranks):
                print(f"--- rank {rank}: {one.status} after {one.seconds:.1f} s\n{one.text}")
    seconds = time.monotonic() - began
    if given.write:
        PAGE.write_text(page(PAGE.read_text(), results, seconds))
    missed = [fault for fault, (_, found) in results.items() if found]
    print(f"{len(missed)} of {len(results)} cells are not as promised; {seconds:.0f} s, {cpu:.0f} s of CPU")
    sys.exit(bool(missed))


def named(fault: Fault) -> str:
    """In one line."""
    return f"{STEPS[fault.step].label}, {fault.kind}, rank {fault.rank} of {fault.ranks}"


def page(text: str, results: Mapping[Fault, tuple[Outcome, list[str]]], seconds: float) -> str:
    """The page with a new table."""
    head, rest = text.split(BEGIN)
    return head + BEGIN + table(results, seconds) + END + rest.split(END)[1]


def table(results: Mapping[Fault, tuple[Outcome, list[str]]], seconds: float) -> str:
    """Steps by kinds, with the seconds until the last rank has ended, and what is missed."""
    missed = {fault: found for fault, (_, found) in results.items() if found}
    lines = [
        f"Of {len(table_cells())} cells {len(results)} were tried, and {len(results) - len(missed)} are as "
        f"promised; this took {seconds:.0f} s on {os.cpu_count()} cores, two at a time.",
        "",
        "| step | " + " | ".join(KINDS) + " |",
        "|---" * (1 + len(KINDS)) + "|",
    ]
    for step in STEPS:
        entries = [STEPS[step].label]
        for kind in KINDS:
            those = {one: results[one][0] for one in results if (one.step, one.kind) == (step, kind)}
            slowest = [max((rank.seconds for rank in one.ranks), default=0.0) for one in those.values()]
            miss = "**miss** " if missed.keys() & those.keys() else ""
            entries.append(f"{miss}{max(slowest):.0f}" if those else "")
        lines.append("| " + " | ".join(entries) + " |")
    lines += ["", *(f"- miss: {named(fault)}: {'; '.join(found)}" for fault, found in missed.items())]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    from tests.kit import faults

    as_script(faults.main)
    sys.exit()
