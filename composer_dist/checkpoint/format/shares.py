"""Which rank writes what: every piece once, replicas spread evenly.

The first rank collects what the ranks hold and deals it out. Where the same pieces are saved again, which
the ranks see by digests, the plan of the last time is used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from composer_dist.checkpoint.format.pieces import Piece
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.errors import CheckpointValueError
from composer_dist.tensors.parts import Dims

_KEPT = 8
"""Plans that are remembered: a run has few kinds of checkpoints."""


_plans: dict[str, tuple[str, list[int]]] = {}
"""Digest of what this rank holds, to digest of what all hold and this rank's share."""


def choose(agreement: Agreement, pieces: Sequence[Piece], shapes: Mapping[str, Dims]) -> list[Piece]:
    """The pieces that this rank writes; every rank calls it with what it holds.

    Args:
        shapes: the full shape of every tensor.

    Raises:
        CheckpointValueError: the ranks save different tensors, or their pieces do not add up to them.
    """
    mine = {
        "shapes": {name: list(shape) for name, shape in shapes.items()},
        "pieces": [[p.name, list(p.start), list(p.values.shape), p.values.nbytes] for p in pieces],
    }
    digest = _digest(mine)

    def is_known(findings: list[list[str]]) -> bool:
        every = _digest([digest for digest, _ in findings])
        return all(plan == every for _, plan in findings)

    plan, share = _plans.get(digest, ("", []))
    if not agreement.reach("the plan of the checkpoint", [digest, plan], is_known):
        dealt = agreement.reach("the pieces of the checkpoint", mine, deal)
        share = dealt["shares"][agreement.ranks.index(agreement.rank)]
        while len(_plans) >= _KEPT:
            del _plans[next(iter(_plans))]
        _plans[digest] = dealt["plan"], share
    return [pieces[number] for number in share]


def deal(held: list[dict[str, Any]]) -> dict[str, Any]:
    """Give every piece to one of those who hold it: the largest first, to whom has the least so far.

    Returns:
        For each rank the numbers of its pieces, in its own order, and the digest of what all hold.

    Raises:
        CheckpointValueError: the ranks save different tensors, or their pieces do not add up to them.
    """
    shapes = held[0]["shapes"]
    for rank, one in enumerate(held):
        if odd := sorted(n for n in {*shapes, *one["shapes"]} if shapes.get(n) != one["shapes"].get(n)):
            raise CheckpointValueError(
                f"Ranks 0 and {rank} save different tensors: {', '.join(odd[:10])}. Every rank must save the "
                "same names and shapes; a filter must answer alike everywhere."
            )
    holders: dict[tuple[str, tuple[int, ...]], list[tuple[int, int]]] = {}
    sizes: dict[tuple[str, tuple[int, ...]], int] = {}
    lacking = {name: prod(shape) for name, shape in shapes.items()}
    for rank, one in enumerate(held):
        for number, (name, start, box, nbytes) in enumerate(one["pieces"]):
            key = name, tuple(start)
            if key not in holders:
                lacking[name] -= prod(box)
            holders.setdefault(key, []).append((rank, number))
            sizes[key] = nbytes
    if odd := sorted(name for name, numel in lacking.items() if numel):
        raise CheckpointValueError(f"What the ranks hold does not add up to these tensors: {', '.join(odd)}.")
    loads = [0] * len(held)
    shares: list[list[int]] = [[] for _ in held]
    for key in sorted(holders, key=lambda key: (len(holders[key]) > 1, -sizes[key], key)):
        rank, number = min(holders[key], key=lambda place: (loads[place[0]], place[0]))
        loads[rank] += sizes[key]
        shares[rank].append(number)
    return {
        "shares": [sorted(share) for share in shares],
        "plan": _digest([_digest(one) for one in held]),
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
