"""What FSDP2 sends during a step, in the order of `torch.distributed.fsdp._fully_shard`."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

import torch

from composer_dist.distributed.feature_plan import StepEvent, Transfer
from composer_dist.distributed.sharding.memory import UnitSizes
from composer_dist.structure.structure import TensorInfo


class UnitTraffic:
    """Follows the units of one rank through a step.

    A unit is gathered before its forward, and again before its backward if it was resharded. Backward also
    gathers the unit before in advance, whether or not that one has a backward. Gradients of trainable
    parameters are reduced and scattered, and then averaged over replicas.

    Args:
        units: by name.
        dimension: of the mesh, over which parameters are sharded.
        ranks: that share each parameter; a single one sends nothing.
        replicas: of the sharded model.
        smaller: ranks that gather in backward, of units that are resharded to fewer ranks after forward.
        first: what is sent before the forward.
        last: what is sent after the backward.
    """

    def __init__(
        self,
        units: Mapping[str, UnitSizes],
        dimension: str,
        ranks: int,
        replicas: int,
        smaller: Mapping[str, int],
        first: Sequence[Transfer],
        last: Sequence[Transfer],
    ) -> None:
        self._units, self._dimension, self._ranks, self._replicas = units, dimension, ranks, replicas
        self._smaller, self._first, self._last = smaller, first, last
        self._whole: set[str] = set()
        """The units that are gathered."""
        self._in_backward: set[str] = set()
        self._order: list[str] = []
        """The units whose backward is to come, in the order of their forwards."""

    def __call__(self, event: StepEvent) -> Iterator[Transfer]:
        """What is sent at an event."""
        name = event.unit
        if event.moment == "begin":
            yield from self._first
        if event.moment == "after backward":
            self._order.clear()
            yield from self._last
        if name not in self._units:
            return
        unit = self._units[name]
        match event.moment:
            case "before forward" if name not in self._in_backward:
                yield from self._gather(name)
            case "after forward" if name not in self._in_backward:
                self._order.append(name)
                if unit.reshards:
                    self._whole.discard(name)
            case "before backward":
                self._in_backward.add(name)
                yield from self._gather(name, resharded=True)
                if name in self._order and (index := self._order.index(name)):
                    before = self._gather(self._order[index - 1], resharded=True)
                    yield from (one._replace(early=True) for one in before)
            case "before reduction":
                self._in_backward.discard(name)
                self._whole.discard(name)
            case "after reduction" if unit.gradients:
                if self._ranks > 1:
                    yield Transfer("reduce_scatter", self._dimension, self._ranks, unit.gradients)
                if self._replicas > 1:
                    yield Transfer("all_reduce", "dp_replicate", self._replicas, unit.reduced)

    def _gather(self, name: str, resharded: bool = False) -> Iterator[Transfer]:
        if name in self._whole:
            return
        self._whole.add(name)
        ranks = self._smaller.get(name, self._ranks) if resharded else self._ranks
        if ranks > 1 and self._units[name].gathered:
            yield Transfer("all_gather", self._dimension, ranks, self._units[name].gathered)


def followed_buffers(
    buffers: Iterable[TensorInfo], norms: Sequence[str], groups: Sequence[tuple[str, int]]
) -> Iterator[Transfer]:
    """What `FollowBuffers` sends before each forward for training but the first.

    Args:
        buffers: of the model.
        norms: the names of batch norms, whose buffers always follow.
        groups: dimensions of the mesh, with their ranks.
    """
    others = False
    for one in buffers:
        if one.owners[0] not in norms:
            others = True
            continue
        yield from (Transfer("broadcast", *group, one.nbytes) for group in groups)
    if others:  # whether one of them has changed somewhere
        yield from (Transfer("all_reduce", *group, torch.int32.itemsize) for group in groups)


def averaged_gradients(
    parameters: Iterable[TensorInfo], groups: Sequence[tuple[str, int]]
) -> Iterator[Transfer]:
    """What averages the gradients of whole, trainable parameters: see `PlainGradientAveraging`."""
    numels: Counter[torch.dtype] = Counter()
    for one in parameters:
        numels[torch.promote_types(one.dtype, torch.float32)] += prod(one.shape) + 1
    for dtype, numel in numels.items():
        yield from (Transfer("all_reduce", *group, numel * dtype.itemsize) for group in groups)
