"""How a batch is fetched, in a worker or not: the samples of one rank, with its own randomness."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Any

from torch.utils.data import Dataset, IterableDataset, get_worker_info

from composer_dist.trainer.data.order import share
from composer_dist.trainer.data.randomness import OwnRandomness, seed_host, set_aside

Request = tuple[int, list[int]]
"""The seed of a batch, and the indices of its samples."""
Collate = Callable[[list[Any]], Any]


class FetchBatch(Dataset[Any]):
    """Whole batches of a dataset: `fetch[seed, indices]`, collated.

    What the dataset and `collate` draw at random depends on the seed alone, in any process.
    """

    def __init__(self, dataset: Any, collate: Collate) -> None:
        self.dataset = dataset
        self.collate = collate

    def __getitem__(self, request: Request) -> Any:
        seed, indices = request
        with nullcontext() if get_worker_info() else set_aside():
            seed_host(seed)
            many = getattr(self.dataset, "__getitems__", None)
            return self.collate(many(indices) if many else [self.dataset[index] for index in indices])


class StreamBatches(IterableDataset[Any]):
    """Batches of one rank's share of a stream that every rank reads as a whole.

    Args:
        dataset: gives the same samples on every rank.
        collate: samples to a batch.
        size: samples of all ranks together.
        num_replicas: ranks with different data.
        rank: this one.
        start: samples to skip.
        drop_last: leave out a last batch that is smaller.
        seed: of what the dataset and `collate` draw.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        collate: Collate,
        *,
        size: int,
        num_replicas: int,
        rank: int,
        start: int,
        drop_last: bool,
        seed: int,
    ) -> None:
        self.dataset, self.collate, self.seed = dataset, collate, seed
        self.size, self.num_replicas, self.rank = size, num_replicas, rank
        self.start, self.drop_last = start, drop_last

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
