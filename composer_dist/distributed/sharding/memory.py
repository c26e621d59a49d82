"""What FSDP2 allocates and frees during a step, in the order of `torch.distributed.fsdp._fully_shard`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from composer_dist.distributed.feature_plan import Change, StepEvent


@dataclass(frozen=True)
class UnitSizes:
    """The bytes of one unit on one rank, with padding."""

    gathered: int
    """Of its parameters on all ranks, as they are computed with."""
    cast: int
    """Of this rank's parts, cast or uploaded for the all-gather; 0 where neither is done."""
    gradients: int
    """Of the gradients of all ranks, as they are reduced."""
    reduced: int
    """Of this rank's parts of them."""
    stored: int
    """Of these in the dtype of the parameters; 0 where that is the same dtype."""
    reshards: bool
    """After forward."""
    offloads: bool = False
    """Whether the parts and their gradients are in host memory."""


class UnitMemory:
    """Follows the units of one rank through a step.

    An all-gather fills a buffer, from which the parameters are copied. In forward FSDP2 keeps it until the
    next one is full. In backward it fills the buffer of the unit before while one computes, and keeps the
    input of a reduce-scatter until the next.

    Args:
        units: by name.
        ranks: that share each parameter; a single one copies its parameters without a buffer.
        staged: whether the backend copies what it sends, as gloo does.
    """

    def __init__(self, units: Mapping[str, UnitSizes], ranks: int, staged: bool) -> None:
        self._units, self._ranks, self._staged = units, ranks, staged
        self._whole: set[str] = set()
        """The units that are gathered."""
        self._filled: set[str] = set()
        """Those whose buffers are full."""
        self._order: list[str] = []
        """The units, in the order of their forwards."""
        self._kept = self._reducing = 0
        """The sizes of the buffer that forward keeps, and of the last reduce-scatter's input."""

    def __call__(self, event: StepEvent) -> Iterator[Change]:
        """What changes at an event."""
        name = event.unit
        if event.moment == "after backward":
            yield self._communication(-self._reducing)
            self._reducing = 0
        if name not in self._units:
            return
        unit = self._units[name]
        match event.moment:
            case "before forward" if name not in self._whole:
                yield from self._fill(name)
                yield self._communication(-self._kept)
                self._kept = 0 if self._ranks == 1 else unit.gathered
                yield from self._copy_out(name)
            case "after forward":
                self._order.append(name)
                if unit.reshards:
                    yield from self._free(name)
                if name == self._order_end():
                    yield self._communication(-self._kept)
                    self._kept = 0
            case "before backward":
                if name not in self._whole:
                    yield from self._fill(name)
                    yield from self._copy_out(name)
                    yield self._communication(0 if self._ranks == 1 else -unit.gathered)
                if name in self._order and (index := self._order.index(name)):
                    yield from self._fill(self._order[index - 1])
            case "before reduction":
                yield from self._free(name)
                yield self._communication(-self._reducing)
                yield self._communication(unit.gradients)
                self._reducing = unit.gradients
            case "after reduction":
                yield Change("gradients", unit.reduced)
                yield from self._send(unit.gradients)
                if unit.stored:
                    yield Change("gradients", unit.stored)
                    yield Change("gradients", -unit.reduced)
                if unit.offloads:
                    yield Change("gradients", -(unit.stored or unit.reduced))

    def _order_end(self) -> str:
        """The root, whose forward ends last."""
        return next(iter(self._units))

    def _fill(self, name: str) -> Iterator[Change]:
        if name in self._filled or name in self._whole or self._ranks == 1:
            return
        self._filled.add(name)
        unit = self._units[name]
        yield self._communication(unit.cast)
        yield self._communication(unit.gathered)
        yield self._communication(-unit.cast)
        yield from self._send(unit.gathered)

    def _copy_out(self, name: str) -> Iterator[Change]:
        self._filled.discard(name)
        self._whole.add(name)
        yield Change("gathered", self._units[name].gathered)

    def _free(self, name: str) -> Iterator[Change]:
        if name in self._whole:
            self._whole.remove(name)
            yield Change("gathered", -self._units[name].gathered)

    def _send(self, nbytes: int) -> Iterator[Change]:
        if self._staged and self._ranks > 1:
            yield self._communication(nbytes)
            yield self._communication(-nbytes)

    def _communication(self, nbytes: int) -> Change:
        return Change("communication", nbytes)
