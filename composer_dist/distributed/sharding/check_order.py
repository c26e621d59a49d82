"""Checks that all ranks run the same unit at the same time; otherwise they would hang.

A unit's all-gather needs every rank. If one rank skips a unit (an image tower, for a batch without images),
its next collective meets the other ranks' collective for the skipped unit: they hang, or exchange the wrong
bytes. If each rank uses another expert, the reductions add up gradients of different parameters. If one rank
skips an optimizer's step, the shards belong to different steps. Before each collective the ranks therefore
compare its model, unit, parameters, length and step: in memory that they share if all are on one host, and
otherwise in a message of a few bytes. On a CPU mesh this is on by default. With an accelerator it makes the
hosts wait for each other, so it is off by default (`ParallelismConfig.check_order`).

On CPUs of one host, what small units gather and reduce goes through that memory too, which takes less time
than messages. Ranks that meet there compare in any case.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composer_dist import _torch
from composer_dist.distributed.before_steps import refuse_uneven
from composer_dist.distributed.prepared import Prepared
from composer_dist.distributed.ranks.board import Board
from composer_dist.distributed.ranks.failures import is_lost
from composer_dist.distributed.ranks.reports import reason_of_loss
from composer_dist.distributed.training.average_gradients import exchange
from composer_dist.errors import ParallelismRuntimeError


def check_call_order(
    units: Mapping[str, nn.Module], record: Prepared, mesh: DeviceMesh, always: bool
) -> None:
    """Compare the ranks before each collective of these units: names, in one order, and leading modules.

    Also how often optimizers have stepped, by the model's record. Unless `always`, only before a group's
    first collective and those that go through shared memory.
    """
    group = mesh.get_group(mesh.ndim - 1)
    _models[group] = number = _models.get(group, 0) + 1
    names = [name or "the root" for name in units]
    order = _Order(names, number, record, _torch.collective_timeout(), always)
    for index, module in enumerate(units.values()):
        _torch.before_collectives(module, partial(_compare, order, index))


_boards: WeakKeyDictionary[dist.ProcessGroup, Board | None] = WeakKeyDictionary()
"""Of all models, made after a group's first comparison; None where the ranks share no memory."""
_models: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""How many models each group has prepared, which is the same on all of its ranks."""


@dataclass
class _Order:
    """How the ranks compare what they run."""

    names: Sequence[str]
    """Of the units."""
    model: int
    """Its number among those of the group."""
    record: Prepared
    limit: timedelta
    always: bool
    """Whether to compare also before collectives that are messages."""
    met: set[dist.ProcessGroup] = field(default_factory=set)
    """The groups whose ranks have compared this model once."""

    def agree(
        self, facts: Sequence[int], groups: Sequence[dist.ProcessGroup], data: torch.Tensor | None
    ) -> tuple[bool, torch.Tensor | None]:
        """Whether all ranks show the same facts, and the `data` of the first group's, `(ranks, numel)`.

        False also where there are no boards to compare on, and None where they have no room. What need not be
        compared counts as the same.
        """
        boards = [board for group in groups if (board := _boards.get(group)) is not None]
        wanted = self.always or not self.met.issuperset(groups)
        if len(boards) < len(groups) or Board.rests:
            return not wanted, None
        places = None if data is None or data.dtype not in _DTYPES else boards[0].places(data)
        if places is None and not wanted:
            return True, None
        if places is not None and data is not None:
            places[0].copy_(data)
            facts = *facts, _DTYPES.index(data.dtype)
        alike = True
        for board in boards:  # a difference in this group is passed on to the next
            alike = board.all_show(hash((*facts, alike)), self.limit) and alike
        if alike:
            self.met.update(groups)
        return alike, places[1] if alike and places is not None else None


_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8)
"""What can be gathered and summed in shared memory."""


def _compare(
    order: _Order,
    index: int,
    reduces: int,
    sent: torch.Tensor,
    groups: Sequence[dist.ProcessGroup],
    plain: bool,
) -> torch.Tensor | None:
    """Raise an error if the ranks' next collectives are for other units, lengths or steps, or one is missing.

    Returns:
        What the ranks of the first group send, where they share memory and the collective is `plain`.
    """
    names, facts = order.names, [order.model, index, reduces, sent.numel(), order.record.steps]
    try:
        alike, rows = order.agree(facts, groups, sent if plain else None)
        if alike:
            return rows
        table = exchange(torch.tensor([[dist.get_rank(), *facts]]), groups).tolist()
        for group in groups if all(row[1:] == table[0][1:] for row in table) and not Board.rests else ():
            order.met.add(group)
            if group not in _boards:
                _boards[group] = Board.make(group)
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
    if one[1:5] == other[1:5]:
        refuse_uneven([(one[0], one[5]), (other[0], other[5])])
    if one[1] != other[1]:
        raise ParallelismRuntimeError(
            f"The ranks run different models: rank {one[0]} the {_ordinal(one[1])} that they have prepared, "
            f"rank {other[0]} the {_ordinal(other[1])}. Every rank must call the models in the same order."
        )
    if one[2] == other[2] and bool(one[3]) == bool(other[3]):
        sizes = f"{one[4]:,} elements, rank {other[0]} {other[4]:,}"
        sizes += " of other parameters" if one[4] == other[4] else ""
        raise ParallelismRuntimeError(
            f"The ranks reduce different gradients of {names[index]}: rank {one[0]} {sizes}. Some ranks did "
            "not use a module inside it, so its parameters have no gradient there; mark such modules with "
            "Rule(..., skippable='root')."
        )
    here, there = (_spell(names, row[2], row[3]) for row in (one, other))
    raise ParallelismRuntimeError(
        f"The ranks run different units: rank {one[0]} is about to {here}, rank {other[0]} to {there}. Every "
        "rank must run every unit, in the same order. If some ranks skip a module (an image tower, for a "
        "batch without images), mark it with Rule(its name, skippable='replicate') or 'root'."
    )


def _ordinal(number: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")


def _spell(names: Sequence[str], index: int, reduces: int) -> str:
    return f"{'reduce the gradients of' if reduces else 'gather'} {names[index]}"
