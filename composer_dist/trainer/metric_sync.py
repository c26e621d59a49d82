"""The states of metrics, gathered from all ranks with different data.

torchmetrics' own gathering counts ranks that share their data, under tensor or context parallelism, several
times; and where a rank had no batch, so that its state is an empty vector of another type, the process dies.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from composer_dist.distributed import process_group
from composer_dist.trainer.setup import data_part, mesh_of

if TYPE_CHECKING:
    from torchmetrics import Metric

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
_MOST_DIMENSIONS = 8


def follow_data(metric: Metric, model: nn.Module) -> None:
    """Lets `metric`, and those inside of it, gather over the ranks as the model's data are spread.

    One that the user has given a group or a way of its own keeps it.
    """
    from torchmetrics import Metric

    part = data_part(mesh_of(model))["rank"]
    for one in metric.modules():
        if isinstance(one, Metric) and one.dist_sync_fn is None and one.process_group is None:
            one.dist_sync_fn = partial(gather_state, part=part)


def gather_state(state: Tensor, group: Any = None, *, part: int) -> list[Tensor]:
    """The `state` of each part of the data, in the parts' order; a collective of all ranks.

    Args:
        state: this rank's; shapes may differ between ranks.
        group: torchmetrics' argument; all ranks take part, always.
        part: which part of the data this rank has.
    """
    world, rank = process_group.world_and_rank()
    table = torch.zeros(world, 3 + _MOST_DIMENSIONS, dtype=torch.int64)
    table[rank, :3] = torch.tensor([part, _DTYPES.index(state.dtype), state.ndim])
    table[rank, 3 : 3 + state.ndim] = torch.tensor(state.shape, dtype=torch.int64)
    rows = process_group.all_reduce(table, "sum").tolist()
    shapes = [torch.Size(row[3 : 3 + row[2]]) for row in rows]
    sizes = [shape.numel() for shape in shapes]
    dtype = next((_DTYPES[row[1]] for row, size in zip(rows, sizes, strict=True) if size), state.dtype)
    # Sums of what is zero elsewhere, so that each backend and device that can reduce will do.
    wide = torch.uint8 if dtype is torch.bool else dtype
    values = torch.zeros(world, max(sizes), dtype=wide, device=state.device)
    values[rank, : state.numel()] = state.detach().flatten().to(wide)
    values = process_group.all_reduce(values, "sum")
    first = {row[0]: index for index, row in reversed([*enumerate(rows)])}
    filled = {place: index for place, index in first.items() if sizes[index]} or first
    return [values[i, : sizes[i]].reshape(shapes[i]).to(dtype) for _, i in sorted(filled.items())]
