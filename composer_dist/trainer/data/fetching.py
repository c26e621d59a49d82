"""How a batch is fetched, in a worker or not: the samples of one rank, with its own randomness."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from torch.utils.data import Dataset, IterableDataset, get_worker_info

from composer_dist.errors import ParallelismRuntimeError
from composer_dist.random_states import derived_seed, seed_host, set_aside
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
        for position in count(self.start, self.size):
            with randomness():
                samples = list(islice(stream, self.size))
            first, end = share(0, len(samples), self.num_replicas, self.rank)
            if first == end or (self.drop_last and len(samples) < self.size):
                return
            with set_aside():  # what this rank's share draws must not move the stream's order
                seed_host(derived_seed("batch", self.seed, position + first))
                batch = self.collate(samples[first:end])
            yield batch
