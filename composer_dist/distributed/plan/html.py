"""The plan as a page: one HTML file for a browser, which loads nothing else."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from composer_dist.distributed.plan.communication import Communication
from composer_dist.distributed.plan.decisions import Decisions
from composer_dist.distributed.plan.memory import HOW, MemoryEstimate
from composer_dist.distributed.plan.text import mesh_in_words
from composer_dist.structure.names import ancestors
from composer_dist.structure.structure import Structure
from composer_dist.wording import dtype_name

_TEMPLATE = Path(__file__).with_name("report.html")
_MOST_POINTS = 1500
"""Of the timeline; the page stays small and the browser fast."""

Moments = Sequence[tuple[str, str, Mapping[str, int]]]


def html_report(
    plan: Decisions,
    structure: Structure,
    explain: Callable[[str], str],
    memory: MemoryEstimate,
    communication: Communication,
    *,
    rank: int,
    device_memory: int | None,
) -> str:
    """See `ParallelPlan.to_html`."""
    kinds = [kind for kind in HOW if kind != "host" and getattr(memory, kind)]
    data = {
        "model": type(structure.modules[""]).__name__,
        "ranks": plan.world_size,
        "mesh": mesh_in_words(plan.mesh),
        "rank": rank,
        "warnings": plan.warnings,
        "modules": _modules(plan, structure, explain),
        "kinds": {
            kind: {"most": getattr(memory, kind), "at_peak": memory.at_peak.get(kind, 0), "how": HOW[kind]}
            for kind in kinds
        },
        "peak": memory.peak,
        "peak_at": memory.peak_at,
        "host": memory.host,
        "device_memory": device_memory,
        "timeline": [
            [phase, unit, *(now.get(kind, 0) for kind in kinds)]
            for phase, unit, now in fewer(memory.timeline, _MOST_POINTS)
        ],
        "traffic": [vars(one) for one in communication],
    }
    # "<" would let a name end the script; JSON may write it as an escape.
    embedded = json.dumps(data, separators=(",", ":")).replace("<", r"\u003c")
    return _TEMPLATE.read_text(encoding="utf-8").replace("{{data}}", embedded)


def fewer(moments: Moments, most: int) -> Moments:
    """At most so many moments of a timeline: of neighbors, the one that takes most memory."""
    size = -(-len(moments) // most) or 1
    return [
        max(moments[start : start + size], key=lambda one: sum(one[2].values()))
        for start in range(0, len(moments), size)
    ]


def _modules(plan: Decisions, structure: Structure, explain: Callable[[str], str]) -> list[dict[str, Any]]:
    nbytes: Counter[str] = Counter()
    held: dict[str, list[tuple[str, str, str]]] = {}
    for one in (held.info for held in structure.tensors.values() if held.info.kind != "attribute"):
        nbytes.update(dict.fromkeys({up for owner in one.owners for up in ancestors(owner)}, one.nbytes))
        shape = f"{dtype_name(one.dtype)} {list(one.shape)}"
        for name, owner in zip(one.names, one.owners, strict=True):
            held.setdefault(owner, []).append((name, shape, explain(name)))
    units = {module: unit.name for unit in plan.units for module in unit.modules}
    inside = ("unit", "no unit", "part of")
    return [
        {
            "name": name,
            "type": type(structure.modules[name]).__name__,
            "action": one.action,
            "unit": next((units[up] for up in ancestors(name) if up in units), None)
            if one.action.startswith(inside)
            else None,
            "bytes": nbytes[name],
            "text": explain(name),
            "tensors": held.get(name, []),
        }
        for name, one in plan.modules.items()
    ]
