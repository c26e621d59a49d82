"""The order of samples: a function of the seed and the epoch, whatever the number of ranks.

All ranks together read the samples of an epoch in one order, a global batch at a time, and each rank
takes its contiguous share of every batch. So after any number of batches, the samples read are the
beginning of that order, and a run on another number of ranks continues after them.
"""

from collections.abc import Iterator, Sequence
from typing import Any
from zlib import crc32

import torch

from composer_dist.random_states import derived_seed


def epoch_order(length: int, shuffle: bool, seed: int, epoch: int) -> Sequence[int] | torch.Tensor:
    """The indices of all samples, in the order of this epoch."""
    if not shuffle:
        return range(length)
    generator = torch.Generator().manual_seed(derived_seed("order", seed, epoch))
    return torch.randperm(length, generator=generator)


def share(first: int, end: int, num_replicas: int, rank: int) -> tuple[int, int]:
    """A rank's part of the positions from `first` to `end`; parts differ by one at most."""
    length = end - first
    return first + length * rank // num_replicas, first + length * (rank + 1) // num_replicas


def global_batches(start: int, length: int, size: int, drop_last: bool) -> Iterator[tuple[int, int]]:
    """The first position and the end of each global batch from `start` on."""
    for first in range(start, length, size):
        end = min(first + size, length)
        if end - first == size or not drop_last:
            yield first, end


def batches_left(start: int, length: int, size: int, drop_last: bool) -> int:
    """The number of batches that remain from sample `start` of `length`."""
    left = max(length - start, 0)
    return left // size if drop_last else -(-left // size)


def streams_in(dataset: Any) -> list[Any]:
    """The dataset, if it is a stream of `datasets`, and those that it reads as its attributes."""
    inner = [dataset, *getattr(dataset, "__dict__", {}).values()]
    return [one for one in inner if hasattr(one, "_ex_iterable")]


def parts_of(stream: Any) -> Iterator[Any]:
    """What a stream of `datasets` consists of: the last step, and each that it reads."""
    waiting = [getattr(stream, "_ex_iterable", None)]
    while waiting:
        if (part := waiting.pop()) is not None:
            yield part
            waiting += getattr(part, "ex_iterables", [getattr(part, "ex_iterable", None)])


def stream_order(dataset: Any) -> int | None:
    """A number that stands for the generators by which streams of `datasets` are shuffled, if they are."""
    parts = (part for stream in streams_in(dataset) for part in parts_of(stream))
    bits = [getattr(getattr(part, "generator", None), "bit_generator", None) for part in parts]
    states = [one.state for one in bits if one is not None]
    return crc32(repr(states).encode()) if states else None


def stream_facts(dataset: Any) -> dict[str, int | None]:
    """What a position in streams of `datasets` depends on: how many files there are, and their order."""
    files = [stream.num_shards for stream in streams_in(dataset)]
    return {"num_shards": sum(files) if files else None, "stream_order": stream_order(dataset)}
