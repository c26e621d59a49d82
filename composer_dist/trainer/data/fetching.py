"""How a batch is fetched, in a worker or not: the samples of one rank, with its own randomness."""

import mmap
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from multiprocessing.util import Finalize
from types import FrameType
from typing import Any

from torch.utils.data import Dataset, IterableDataset, get_worker_info

from composer_dist.errors import ParallelismRuntimeError
from composer_dist.random_states import seed_host, set_aside
from composer_dist.trainer.data.order import share
from composer_dist.trainer.data.randomness import OwnRandomness
from composer_dist.wording import listed

Request = tuple[int, list[int]]
"""The seed of a batch, and the indices of its samples."""
Collate = Callable[[list[Any]], Any]


@dataclass(eq=False)
class FetchBatch(Dataset[Any]):
    """Whole batches of a dataset: `fetch[seed, indices]`, collated.

    What the dataset and `collate` draw at random depends on the seed alone, in any process.
    """

    dataset: Any
    collate: Collate

    def __getitem__(self, request: Request) -> Any:
        seed, indices = request
        with nullcontext() if get_worker_info() else set_aside():
            seed_host(seed)
            many = getattr(self.dataset, "__getitems__", None)
            try:
                return self.collate(many(indices) if many else [self.dataset[index] for index in indices])
            except StopIteration as error:  # a loader would take it for the end of the epoch
                raise ParallelismRuntimeError(
                    f"The dataset or collate_fn raised StopIteration for the samples {listed(indices)}."
                ) from error


@dataclass(eq=False, kw_only=True)
class StreamBatches(IterableDataset[Any]):
    """Batches of one rank's share of a stream that every rank reads as a whole."""

    dataset: Iterable[Any]
    """Gives the same samples on every rank."""
    collate: Collate
    size: int
    """Samples of all ranks together."""
    num_replicas: int
    """Ranks with different data."""
    rank: int
    start: int
    """Samples to skip."""
    drop_last: bool
    """Leave out a last batch that is smaller."""
    seed: int
    """Determines what the dataset and `collate` draw."""

    def __iter__(self) -> Iterator[Any]:
        randomness = OwnRandomness(self.seed)
        with randomness():
            stream = iter(self.dataset)
            for _ in islice(stream, self.start):
                pass
        while True:
            with randomness():
                samples = list(islice(stream, self.size))
                first, end = share(0, len(samples), self.num_replicas, self.rank)
                if first == end or (self.drop_last and len(samples) < self.size):
                    return
                batch = self.collate(samples[first:end])
            yield batch


@dataclass(frozen=True)
class IgnoreSigterm:
    """A DataLoader's `worker_init_fn`: SIGTERM ends a forked worker only if its parent closes it, or is gone.

    Schedulers send it to all processes of a job. The parent notes it, but needs another batch before all
    ranks can save. Workers that are not forked end as torch has them end.
    """

    then: Callable[[int], None] | None = None
    """Another one, which runs afterwards."""

    def __call__(self, worker: int) -> None:  # noqa: D102
        if _exits is not None and _exits[0] == os.getppid():
            signal.signal(signal.SIGTERM, _on_sigterm)
        if self.then is not None:
            self.then(worker)


_exits: tuple[int, mmap.mmap] | None = None
"""The process that forks workers, and a byte that it shares with them: whether it exits."""


def spare_workers(dataloader: Any) -> None:
    """Have the workers of a torch DataLoader, whose iterators are made later, ignore a SIGTERM of others."""
    global _exits
    first = getattr(dataloader, "worker_init_fn", IgnoreSigterm())
    if isinstance(first, IgnoreSigterm):
        return
    try:
        dataloader.worker_init_fn = IgnoreSigterm(first)
    except AttributeError:  # a wrapper that only shows it
        return
    if _exits is None or _exits[0] != os.getpid():
        _exits = os.getpid(), mmap.mmap(-1, 1)
        # At its exit, before multiprocessing sends SIGTERM to them and then waits without limit.
        Finalize(None, _end_workers, _exits, exitpriority=0)


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    assert _exits is not None
    parent, exits = _exits
    closed = exits[0] or os.getppid() != parent
    while frame is not None and not closed:
        done = frame.f_locals.get("done_event")  # torch's worker loop has it, which sets it when it is closed
        closed, frame = done is not None and done.is_set(), frame.f_back
    if closed:
        os._exit(0)  # as torch's own handler does


def _end_workers(parent: int, exits: mmap.mmap) -> None:
    exits[0] = 1
    workers = [one for one in multiprocessing.active_children() if one.daemon]
    for worker in workers:
        worker.terminate()
    end = time.monotonic() + _LONGEST
    for worker in workers:
        worker.join(max(end - time.monotonic(), 0))
        if worker.is_alive():
            worker.kill()


_LONGEST = 5.0
"""Seconds that workers have to end when their parent exits."""
