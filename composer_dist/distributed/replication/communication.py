"""What DDP sends during a step: its buckets, and the buffers of the first rank."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

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
        self._gradients, self._buffers, self._limits = gradients, buffers, limits
        self._reduced, self._searches, self._ranks = reduced, searches, ranks
        self._arrived: list[str] = []

    def __call__(self, event: StepEvent) -> Iterator[Transfer]:
        """What is sent at an event; of buckets at the end."""
        if self._ranks == 1:
            return
        match event.moment:
            case "begin":
                for size, _ in _buckets(self._buffers, (BUFFERS, BUFFERS)):
                    yield Transfer("broadcast", "dp_replicate", self._ranks, size)
            case "gradient":
                self._arrived.append(event.name)
            case "after backward":
                yield from self._reduce()

    def _reduce(self) -> Iterator[Transfer]:
        # In the first step, and whenever DDP searches, buckets have the order of the parameters.
        names = list(self._gradients)
        if self._arrived and not self._searches:
            names = [name for name in self._arrived if name in self._gradients]
        elif not self._searches:
            names.reverse()
        for size, dtype in _buckets((self._gradients[name] for name in names), self._limits):
            itemsize = (self._reduced or dtype).itemsize
            yield Transfer("all_reduce", "dp_replicate", self._ranks, size // dtype.itemsize * itemsize)
        if self._searches:
            nbytes = len(self._gradients) * torch.int32.itemsize
            yield Transfer("all_reduce", "dp_replicate", self._ranks, nbytes)


def _buckets(
    tensors: Iterable[tuple[int, torch.dtype]], limits: tuple[int, int]
) -> Iterator[tuple[int, torch.dtype]]:
    """The bytes of buckets, each of one dtype, as torch's `compute_bucket_assignment_by_size` fills them."""
    filled: dict[torch.dtype, int] = {}
    started: set[torch.dtype] = set()
    for numel, dtype in tensors:
        filled[dtype] = filled.get(dtype, 0) + numel * dtype.itemsize
        if filled[dtype] >= limits[dtype in started]:
            started.add(dtype)
            yield filled.pop(dtype), dtype
    yield from ((size, dtype) for dtype, size in filled.items())
