"""What ended the work on one rank, told to those that wait for it in vain.

A rank whose own code raises leaves; the others find their connections closed, or their collective timed
out, and know no reason. So the first rank that fails by itself writes why into the store, and a rank whose
collective fails looks there and raises the same. It costs nothing while all is well. The store must
outlive the rank: torchrun's agent has it, or rank 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

from composer_dist import _torch
from composer_dist.distributed.ranks import process_group
from composer_dist.distributed.ranks.failures import is_lost, pack, unpack
from composer_dist.distributed.ranks.waiting import poll

PATIENCE = timedelta(seconds=2)
"""How long a rank that has lost the others waits for a report: theirs may be on its way."""


@contextmanager
def told_to_all() -> Iterator[None]:
    """Run a body whose failure on one rank is told to the others; every rank enters it alike.

    Raises:
        ParallelismError: this rank has lost another one, which reported why; the text says which.
    """
    world, rank = process_group.world_and_rank()
    if world == 1:
        yield
        return
    store = _torch.get_default_store()
    key = f"composer_dist/report/{store.add(f'composer_dist/reporting/{rank}', 1)}"
    try:
        yield
    except BaseException as error:
        if not _has_lost_others(error):
            with suppress(RuntimeError):  # the store has gone with its host
                store.compare_set(key, "", json.dumps([rank, *pack(error)]))
            raise
        if (report := _await_report(store, key, rank)) is not None:
            raise unpack(report) from error
        raise


def _has_lost_others(error: BaseException) -> bool:
    return is_lost(error) or (error.__cause__ is not None and is_lost(error.__cause__))


def _await_report(store: _torch.Store, key: str, rank: int) -> list[str] | None:
    with suppress(RuntimeError, dist.DistError):
        for _ in poll(PATIENCE, lambda: "the reason"):
            if store.check([key]):
                other, kind, text = json.loads(store.get(key))
                return None if other == rank else [kind, f"Rank {other}: {text}"]
    return None
