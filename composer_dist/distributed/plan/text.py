"""Plans and preparations as tables, for a terminal or a log file."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from composer_dist.wording import human_bytes, listed

if TYPE_CHECKING:
    from composer_dist.distributed.account import Preparation
    from composer_dist.distributed.plan.plan import ParallelPlan
    from composer_dist.distributed.sharding.plan import Unit


_WIDTH = 110


def render_plan(plan: ParallelPlan) -> str:
    """The plan's units, alike ones in one row, and what is special about the model."""
    mesh = " x ".join(f"{name} {size}" for name, size in plan.mesh.items() if size > 1) or "one rank"
    table = Table(title=f"Plan for {plan.world_size} rank{'s' * (plan.world_size > 1)} ({mesh})")
    for heading in ("unit", "tensors", "size", "reshard", "reason"):
        table.add_column(heading, justify="right" if heading in {"tensors", "size"} else "left")
    for name, count, unit in _collapse(plan.units):
        table.add_row(
            f"{name} ({count} units)" if count > 1 else name,
            str(len(unit.parameters)),
            human_bytes(unit.nbytes),
            str(unit.reshard_after_forward),
            unit.reason,
        )
    notes = [f"tied: {' = '.join(names)}" for names in plan.ties]
    if plan.replica:
        notes.append(plan.replica.explain())
        notes += [f"left to each rank: {name}" for name in plan.replica.ignored]
    else:
        notes += [f"replicated: {name} ({reason})" for name, reason in plan.plain.items()]
    if plan.tensor_parallel is not None:
        styles = Counter(one.label for one in plan.tensor_parallel.modules.values())
        counts = ", ".join(f"{count} {style}" for style, count in styles.items())
        notes.append(f"tensor parallel: {styles.total()} modules ({counts})")
    if plan.checkpointing:
        modes = sorted({one.mode for one in plan.checkpointing})
        notes.append(f"activations of {len(plan.checkpointing)} modules: {', '.join(modes)}")
    if plan.compiled:
        backends = sorted({one.options["backend"] for one in plan.compiled})
        notes.append(f"compiled: {len(plan.compiled)} modules, each by itself ({', '.join(backends)})")
    if plan.float8:
        notes.append(f"float8: {len(plan.float8)} linear layers")
    if plan.init_peak:
        notes.append(f"initialization takes up to {human_bytes(plan.init_peak)} beside the shards")
    notes += [f"warning: {text}" for text in plan.warnings]
    return "\n".join([_render(table), *notes] if plan.units else [str(table.title), *notes])


def render_preparation(done: Preparation) -> str:
    """What a preparation did: units, bytes moved, peak memory, seconds."""
    table = Table(title="Preparation", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    plan = done.plan
    sharded = sum(unit.nbytes for unit in plan.units)
    mesh = " x ".join(f"{name} {size}" for name, size in plan.mesh.items() if size > 1)
    table.add_row("ranks", f"{plan.world_size} ({mesh})" if mesh else str(plan.world_size))
    table.add_row("units", str(len(plan.units)))
    table.add_row("sharded parameters", f"{len(plan.parameter_units)} ({human_bytes(sharded)})")
    table.add_row("replicated parameters", str(len(plan.plain)))
    if done.initialized:
        table.add_row("initialized", f"{len(done.initialized)}: {listed(done.initialized, 3)}")
    ways = {"memory": "read from memory", "messages": "by messages"}
    way = ways[done.transport]
    moved = f"{human_bytes(done.bytes_moved)} {way}" if done.bytes_moved else "none"
    table.add_row("bytes moved by this rank", moved)
    if done.bytes_read:
        table.add_row("bytes read by this rank", human_bytes(done.bytes_read))
    where = "resident" if done.mesh.device_type == "cpu" else "allocated"
    table.add_row("peak memory of this rank", f"{human_bytes(done.peak_memory)} {where}")
    steps = ", ".join(f"{step} {seconds:.2f}" for step, seconds in done.timings.items())
    table.add_row("seconds", f"{done.seconds:.2f} ({steps})")
    return _render(table)


def _collapse(units: Sequence[Unit]) -> Iterator[tuple[str, int, Unit]]:
    """Units that differ only in the numbers in their names, with how many there are."""
    rows: dict[tuple[str, int, int, bool | int, str], list[Unit]] = {}
    for unit in units:
        pattern = re.sub(r"\d+", "*", unit.name)
        key = (pattern, len(unit.parameters), unit.nbytes, unit.reshard_after_forward, unit.reason)
        rows.setdefault(key, []).append(unit)
    for (pattern, *_), members in rows.items():
        name = pattern if len(members) > 1 else members[0].name
        yield name or "(root)", len(members), members[0]


def _render(table: Table) -> str:
    console = Console(file=io.StringIO(), width=_WIDTH, color_system=None)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().rstrip()
