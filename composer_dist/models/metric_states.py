"""States of torchmetrics on ranks that have had different numbers of samples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from composer_dist.distributed.ranks import process_group
from composer_dist.distributed.ranks.uneven import gather_uneven

if TYPE_CHECKING:
    from torchmetrics import Metric


def count_on(metric: Metric, ranks: list[int] | None) -> None:
    """Have a metric, and the metrics in it, count these ranks' samples, or all, unless its user chose ranks.

    Ranks without samples are left out: their states have other dtypes, and no moments.
    """
    from torchmetrics import Metric  # a second or more, and imported already where there are metrics

    for one in metric.modules():
        if isinstance(one, Metric) and one.process_group is None and one.dist_sync_fn is None:
            one.dist_sync_fn = partial(_gathered, one, ranks)


def _gathered(metric: Metric, ranks: list[int] | None, value: Tensor, group: Any = None) -> list[Tensor]:
    if value is _ABSENT:
        return gather_uneven(value.to(metric.device), False, group)
    counts = ranks is None or process_group.world_and_rank()[1] in ranks
    return gather_uneven(value, counts and not _is_empty(metric), group) or [value]


def _is_empty(metric: Metric) -> bool:
    """Whether it has seen no samples: its state is still the one that it starts from."""
    starts = ((getattr(metric, name), start) for name, start in metric._defaults.items())
    return not metric.update_called and all(
        torch.equal(value, start) if isinstance(start, Tensor) else all(one is _ABSENT for one in value)
        for value, start in starts
    )


_ABSENT = torch.empty(0)
"""An entry of a list that is only as long as another rank's."""


@contextmanager
def equally_long(metric: Metric) -> Iterator[None]:
    """Inside, lists have as many entries on all ranks, because torchmetrics gathers each entry; a collective.

    Lists that it concatenates first need no other entries.
    """
    from torchmetrics import Metric
    from torchmetrics.utilities import dim_zero_cat

    lists = [
        (one, name)
        for one in metric.modules()
        if isinstance(one, Metric) and getattr(one.dist_sync_fn, "func", None) is _gathered
        for name, reduction in one._reductions.items()
        if isinstance(one._defaults[name], list) and reduction is not dim_zero_cat
    ]
    lengths = [len(getattr(one, name)) for one, name in lists]
    most = process_group.rows_of_ranks(lengths).amax(0).int().tolist() if lists else []
    for (one, name), length, longest in zip(lists, lengths, most, strict=True):
        getattr(one, name).extend([_ABSENT] * (longest - length))
    try:
        yield
    finally:
        for (one, name), length in zip(lists, lengths, strict=True):
            del getattr(one, name)[length:]
