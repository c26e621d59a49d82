"""What DDP sends during a step: its buckets, and the buffers of the first rank."""

from collections.abc import Iterator, Mapping, Sequence

import torch

from composer_dist.distributed.feature_plan import StepEvent, Transfer

FIRST_BUCKET = 1 << 20
"""Bytes of DDP's first bucket, unless the size of buckets is given (torch.nn.parallel.distributed)."""
BUFFERS = 250 << 20
"""Bytes of buffers that DDP broadcasts together."""


class BucketTraffic:
    """Follows DDP through a step, after the first one, in which buckets get the order of the gradients.

    Args:
        gradients: of trainable parameters: number of elements and dtype, by name.
        buffers: that are broadcast before each forward, the same of each.
        limits: bytes of the first bucket and of each later one.
        reduced: the dtype in which buckets are sent; None is the gradients' own.
        searches: whether DDP looks for parameters that no rank has used.
        ranks: number of replicas.
    """

    def __init__(
        self,
        gradients: Mapping[str, tuple[int, torch.dtype]],
        buffers: Sequence[tuple[int, torch.dtype]],
        limits: tuple[int, int],
        reduced: torch.dtype | None,
        searches: bool,
        ranks: int,
    ) -> None:
        self._gradients, self._buffers = gradients, buffers
        self._reduced, self._searches, self._ranks = reduced, searches, ranks
        self._buckets = _Buckets(limits)
        self._arrived = False

    def __call__(self, event: StepEvent) -> Iterator[Transfer]:
        """What is sent at an event: a bucket when it is full, or all at the end of a search."""
        if self._ranks == 1:
            return
        match event.moment:
            case "begin":
                buffers = _Buckets((BUFFERS, BUFFERS))
                sizes = [*(size for one in self._buffers for size in buffers.add(*one)), *buffers.rest()]
                yield from (Transfer("broadcast", "dp_replicate", self._ranks, size) for size, _ in sizes)
            case "gradient" if not self._searches and event.name in self._gradients:
                self._arrived = True
                yield from map(self._reduce, self._buckets.add(*self._gradients[event.name]))
            case "after backward":
                if not self._arrived:  # not traced, or in the order of the parameters
                    for name in [*self._gradients][:: 1 if self._searches else -1]:
                        yield from map(self._reduce, self._buckets.add(*self._gradients[name]))
                yield from map(self._reduce, self._buckets.rest())
                if self._searches:
                    nbytes = len(self._gradients) * torch.int32.itemsize
                    yield Transfer("all_reduce", "dp_replicate", self._ranks, nbytes)

    def _reduce(self, bucket: tuple[int, torch.dtype]) -> Transfer:
        size, dtype = bucket
        nbytes = size // dtype.itemsize * (self._reduced or dtype).itemsize
        return Transfer("all_reduce", "dp_replicate", self._ranks, nbytes)


class _Buckets:
    """Fills buckets, each of one dtype, as torch's `compute_bucket_assignment_by_size` does.

    Args:
        limits: bytes of the first bucket and of each later one.
    """

    def __init__(self, limits: tuple[int, int]) -> None:
        self._limits = limits
        self._filled: dict[torch.dtype, int] = {}
        self._started: set[torch.dtype] = set()

    def add(self, numel: int, dtype: torch.dtype) -> Iterator[tuple[int, torch.dtype]]:
        """Put a tensor into its bucket; yields the bytes and the dtype of the bucket if it is full."""
        self._filled[dtype] = self._filled.get(dtype, 0) + numel * dtype.itemsize
        if self._filled[dtype] >= self._limits[dtype in self._started]:
            self._started.add(dtype)
            yield self._filled.pop(dtype), dtype

    def rest(self) -> list[tuple[int, torch.dtype]]:
        """The buckets that are not full."""
        return [(size, dtype) for dtype, size in self._filled.items()]
