"""Checks that all ranks run the same unit at the same time; otherwise they would hang.

A unit's all-gather needs every rank. If one rank skips a unit (an image tower, for a batch without images),
its next collective meets the other ranks' collective for the skipped unit: they hang, or exchange the wrong
bytes. If one rank skips an optimizer's step, the shards belong to different steps. Before each collective the
ranks therefore compare its unit, length and step: in memory that they share if all are on one host, and
otherwise in a message of a few bytes. On a CPU mesh this is on by default. With an accelerator it makes the
hosts wait for each other, so it is off by default (`ParallelismConfig.check_order`).

On CPUs of one host, what small units gather and reduce goes through that memory too, which takes less time
than messages. Ranks that meet there compare in any case.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from composer_dist import _torch
from composer_dist.distributed.prepared import Prepared
from composer_dist.distributed.ranks import process_group
from composer_dist.distributed.ranks.board import Board
from composer_dist.distributed.ranks.failures import is_lost
from composer_dist.distributed.ranks.reports import reason_of_loss
from composer_dist.errors import ParallelismRuntimeError


def check_call_order(units: Mapping[str, nn.Module], record: Prepared, always: bool) -> None:
    """Compare the ranks before each collective of these units: names, in one order, and leading modules.

    Also how often optimizers have stepped, by the model's record. Unless `always`, only before a group's
    first collective and those that go through shared memory.
    """
    order = _Order([name or "the root" for name in units], record, _torch.collective_timeout(), always)
    for index, module in enumerate(units.values()):
        _torch.before_collectives(module, partial(_compare, order, index))


@dataclass
class _Order:
    """How the ranks compare what they run."""

    names: Sequence[str]
    """Of the units."""
    record: Prepared
    limit: timedelta
    always: bool
    """Whether to compare also before collectives that are messages."""
    boards: dict[dist.ProcessGroup, Board | None] = field(default_factory=dict)
    """Made after a group's first comparison; None where the ranks share no memory."""

    def agree(
        self, facts: Sequence[int], groups: Sequence[dist.ProcessGroup], data: torch.Tensor | None
    ) -> tuple[bool, torch.Tensor | None]:
        """Whether all ranks show the same facts, and the `data` of the first group's, `(ranks, numel)`.

        False also where there are no boards to tell, and None where they have no room. What need not be
        compared counts as the same.
        """
        boards = [board for group in groups if (board := self.boards.get(group)) is not None]
        if len(boards) < len(groups) or Board.rests:
            return not self.always and all(group in self.boards for group in groups), None
        places = None if data is None or data.dtype not in _DTYPES else boards[0].places(data)
        if places is None and not self.always:
            return True, None
        if places is not None and data is not None:
            places[0].copy_(data)
            facts = *facts, _DTYPES.index(data.dtype)
        alike = True
        for board in boards:  # the next group is told of a difference in this one
            alike = board.all_show(hash((*facts, alike)), self.limit) and alike
        return alike, places[1] if alike and places is not None else None


_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8)
"""What can be gathered and summed in shared memory."""


def exchange(facts: torch.Tensor, groups: Sequence[dist.ProcessGroup]) -> torch.Tensor:
    """The rows of `facts`, `(rows, columns)`, of all ranks of `groups`, one group after the other."""
    for group in groups:
        near = facts.to(process_group.device_for_facts(group))
        everyone = [torch.empty_like(near) for _ in range(group.size())]
        dist.all_gather(everyone, near, group=group)
        facts = torch.cat(everyone).cpu()
    return facts


def _compare(
    order: _Order,
    index: int,
    reduces: bool,
    sent: torch.Tensor,
    groups: Sequence[dist.ProcessGroup],
    plain: bool,
) -> torch.Tensor | None:
    """Raise an error if the ranks' next collectives are for other units, lengths or steps, or one is missing.

    Returns:
        What the ranks of the first group send, where they share memory and the collective is `plain`.
    """
    names, facts = order.names, [index, int(reduces), sent.numel(), order.record.steps]
    try:
        alike, rows = order.agree(facts, groups, sent if plain else None)
        if alike:
            return rows
        table = exchange(torch.tensor([[dist.get_rank(), *facts]]), groups).tolist()
        for group in groups:
            if (
                group not in order.boards
                and not Board.rests
                and all(row[1:] == table[0][1:] for row in table)
            ):
                order.boards[group] = Board.make(group)
    except RuntimeError as error:
        what = _spell(names, index, reduces)
        raise reason_of_loss(error, what) or ParallelismRuntimeError(
            f"This rank waits to {what}, but another rank did not arrive or has died; every rank must run "
            "every unit, in the same order. See the other ranks' output."
        ) from (None if is_lost(error) else error)
    one = table[0]
    other = next((row for row in table if row[1:] != one[1:]), None)
    if other is None:
        return None
    if one[1:4] == other[1:4]:
        raise ParallelismRuntimeError(
            f"Optimizers have stepped {one[4]} times on rank {one[0]}, but {other[4]} times on rank "
            f"{other[0]}. Every rank must call optimizer.step() after the same batches, also where its own "
            "loss is not finite."
        )
    if one[1:3] == other[1:3]:
        raise ParallelismRuntimeError(
            f"The ranks reduce different gradients of {names[index]}: rank {one[0]} {one[3]:,} elements, "
            f"rank {other[0]} {other[3]:,}. Some ranks did not use a module inside it, so its parameters "
            "have no gradient there; mark such modules with Rule(..., skippable='root')."
        )
    here, there = (_spell(names, row[1], bool(row[2])) for row in (one, other))
    raise ParallelismRuntimeError(
        f"The ranks run different units: rank {one[0]} is about to {here}, rank {other[0]} to {there}. Every "
        "rank must run every unit, in the same order. If some ranks skip a module (an image tower, for a "
        "batch without images), mark it with Rule(its name, skippable='replicate') or 'root'."
    )


def _spell(names: Sequence[str], index: int, reduces: bool) -> str:
    return f"{'reduce the gradients of' if reduces else 'gather'} {names[index]}"
