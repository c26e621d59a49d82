"""Ranks that run different units at the same time raise an error instead of waiting for one another.

A unit's all-gather needs every rank. Where one rank skips a unit (an image tower, for a batch without
images), its next collective would meet the others' collective for the unit that it skipped: they would
hang, or exchange the wrong bytes. So before each collective the ranks compare, in a message of a few
bytes, which unit it is for and how long it is. On a CPU mesh that costs about one per cent of a unit's
own collectives and is on; with an accelerator it makes the hosts wait for one another, so there it is
on only when it is asked for (`ParallelismConfig.check_order`).
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from composer_dist import _torch
from composer_dist.distributed.ranks import process_group
from composer_dist.errors import ParallelismRuntimeError


def check_call_order(units: Mapping[str, nn.Module]) -> None:
    """From now on compare, before each collective of these units, that all ranks are at the same one.

    Args:
        units: the leading module of each by name, in an order that is the same on every rank.
    """
    names = [name or "the root" for name in units]
    for index, module in enumerate(units.values()):
        _torch.before_collectives(module, partial(_compare, names, index))


def exchange(facts: torch.Tensor, groups: Sequence[dist.ProcessGroup]) -> torch.Tensor:
    """The rows of numbers `(rows, columns)` of all ranks of `groups`, one group after the other."""
    for group in groups:
        near = facts.to(process_group.device_for_facts(group))
        everyone = [torch.empty_like(near) for _ in range(group.size())]
        dist.all_gather(everyone, near, group=group)
        facts = torch.cat(everyone).cpu()
    return facts


def _compare(
    names: Sequence[str], index: int, reduces: bool, numel: int, groups: Sequence[dist.ProcessGroup]
) -> None:
    """Compare what is about to happen here with the other ranks.

    Raises:
        ParallelismRuntimeError: another unit, or another length, on some rank; the same text on all that
            take part. Or some rank did not come at all.
    """
    try:
        table = exchange(torch.tensor([[dist.get_rank(), index, reduces, numel]]), groups).tolist()
    except RuntimeError as error:
        raise ParallelismRuntimeError(
            f"This rank is about to {_spell(names, index, reduces)}, and another rank does not come, or was "
            "lost; every rank must run every unit, in the same order. See the ranks' own output."
        ) from error
    one = table[0]
    other = next((row for row in table if row[1:] != one[1:]), None)
    if other is None:
        return
    if one[1:3] == other[1:3]:
        raise ParallelismRuntimeError(
            f"The ranks reduce different gradients of {names[index]}: rank {one[0]} {one[3]:,} elements, "
            f"rank {other[0]} {other[3]:,}. Some parameters got no gradient on some ranks, because a module "
            "in it was not used there; let those modules be Rule(..., skippable='root')."
        )
    here, there = (_spell(names, row[1], bool(row[2])) for row in (one, other))
    raise ParallelismRuntimeError(
        f"The ranks run different units: rank {one[0]} is about to {here}, rank {other[0]} to {there}. Every "
        "rank must run every unit, in the same order. Where some ranks skip a module (an image tower, for a "
        "batch without images), say so: Rule(its name, skippable='replicate') or 'root'."
    )


def _spell(names: Sequence[str], index: int, reduces: bool) -> str:
    return f"{'reduce the gradients of' if reduces else 'gather'} {names[index]}"
