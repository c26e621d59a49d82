"""Reports why one rank failed to the ranks that wait for it.

When a rank's own code raises, the others only see closed connections or a timeout. The first rank that fails
therefore writes the reason into the store, which torchrun's agent or rank 0 holds; a rank whose collective
fails reads it there and raises the same error. Without failures this costs nothing.
"""

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
"""How long a rank whose collective failed waits for a report."""


@contextmanager
def told_to_all() -> Iterator[None]:
    """Run a body on every rank; if it fails on one, the others raise its error, which names that rank."""
    world, rank = process_group.world_and_rank()
    if world == 1:
        yield
        return
    store = _torch.get_default_store()
    key = f"composer_dist/report/{store.add(f'composer_dist/reporting/{rank}', 1)}"
    try:
        yield
    except BaseException as error:
        if not is_lost(error) and not is_lost(error.__cause__):
            with suppress(RuntimeError):  # the store has gone with its host
                store.compare_set(key, "", json.dumps([rank, *pack(error)]))
            raise
        if (report := _await_report(store, key, rank)) is not None:
            raise unpack(report) from error
        raise


def _await_report(store: _torch.Store, key: str, rank: int) -> list[str] | None:
    with suppress(RuntimeError, dist.DistError):
        for _ in poll(PATIENCE, lambda: "the reason"):
            if store.check([key]):
                other, kind, text = json.loads(store.get(key))
                return None if other == rank else [kind, f"Rank {other}: {text}"]
    return None
