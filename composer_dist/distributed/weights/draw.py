"""Computes any part of a tensor as its initializers do, without the rest of the tensor.

Most initializers only fill tensors, or runs of their elements, and then change each element separately.
Such a fill is computed block by block, and each block draws from a generator of its own, seeded by the
module's name and the block's number. So a rank computes the blocks of its own part only, and the values do
not depend on how a tensor is cut.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from composer_dist import _torch
from composer_dist.random_states import derived_seed
from composer_dist.structure.structure import Held
from composer_dist.tensors.pages import provide
from composer_dist.tensors.parts import Part

_BLOCKS = {"cpu": 1 << 15}
"""Elements per block on a device type; with more, CPU operations take threads, and may round otherwise."""
_BLOCK = 1 << 20
"""On the others."""
_CONSTANTS = (bool, int, float, complex, str, type(None))
_aten = torch.ops.aten
_DRAWS = {
    *(_aten.normal_, _aten.uniform_, _aten.bernoulli_, _aten.random_),
    *(_aten.exponential_, _aten.cauchy_, _aten.log_normal_, _aten.geometric_, _torch.trunc_normal_),
}
_FILLS = {_aten.zero_, _aten.fill_}


@dataclass(frozen=True)
class Operation:
    """One that changes a run of a tensor's elements in place, each separately."""

    call: Callable[..., Any]
    tensor: str
    dtype: torch.dtype
    start: int
    numel: int
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    random: bool
    fills: bool
    """Whether it does not look at the values before."""

    @classmethod
    def of(cls, call: Any, tensor: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "Operation | None":
        """A call that writes to its first argument, a view of a tensor; None if it is of another kind."""
        target, kind = args[0], getattr(call, "overloadpacket", call)
        random, fills = kind in _DRAWS, kind in _FILLS
        known = random or fills or torch.Tag.pointwise in call.tags
        constant = all(isinstance(value, _CONSTANTS) for value in (*args[1:], *kwargs.values()))
        if not (known and constant and target.is_contiguous()):
            return None
        options = {key: value for key, value in kwargs.items() if key != "generator"}
        start, numel = target.storage_offset(), target.numel()
        arguments = tuple(args[1:])
        return cls(call, tensor, target.dtype, start, numel, arguments, options, random, random or fills)

    def run(self, block: torch.Tensor, generator: torch.Generator, seed: int) -> None:
        """Do it to a block of the run."""
        if self.random:
            self.call(block, *self.arguments, **self.options, generator=generator.manual_seed(seed))
        else:
            self.call(block, *self.arguments, **self.options)


@dataclass(frozen=True)
class Fill:
    """Operations on the same run of elements, of which the first fills it."""

    start: int
    numel: int
    operations: list[tuple[str, Operation]] = field(default_factory=list)
    """Each with what seeds it."""

    def __str__(self) -> str:
        calls = ((stream, one.call.__name__, one.arguments, one.options) for stream, one in self.operations)
        return f"{self.start}, {self.numel}: {list(calls)}"


Fills = Mapping[str, Sequence[Fill]]
"""By tensor; what comes later overwrites what comes before."""


def fills_of(
    programs: Sequence[tuple[str, Sequence[Operation] | None]], tensors: Mapping[str, Held], needed: set[str]
) -> Fills | None:
    """What initializers, each with its module's name, do to the tensors; None if it is not only fills."""
    found: dict[str, list[Fill]] = {name: [] for name in needed}
    for module, program in programs:
        for number, one in enumerate(program or ()):
            info, fills = tensors[one.tensor].info, found.setdefault(one.tensor, [])
            if one.fills:
                if one.numel == prod(info.shape):
                    fills.clear()
                fills.append(Fill(one.start, one.numel))
            if info.inner or one.dtype != info.dtype or not fills:
                return None
            if (fills[-1].start, fills[-1].numel) != (one.start, one.numel):
                return None
            fills[-1].operations.append((f"{module}/{number}", one))
    whole = all(found[name] and found[name][0].numel == prod(tensors[name].info.shape) for name in needed)
    if not whole or any(program is None for _, program in programs):
        return None
    return {name: found[name] for name in sorted(needed)}


@torch.no_grad()
def draw(fills: Sequence[Fill], seed: int, part: Part, target: torch.Tensor, device: torch.device) -> None:
    """Compute the elements `part` of a tensor on `device`, into the flat, contiguous `target`."""
    size, generator = _BLOCKS.get(device.type, _BLOCK), torch.Generator(device)
    scratch = torch.empty(0, dtype=target.dtype, device=device)
    for fill in fills:
        seeds = [derived_seed(seed, stream) for stream, _ in fill.operations]
        position, held, end = 0, -1, fill.start + fill.numel
        for first, length in part.runs():
            low, high = max(first, fill.start), min(first + length, end)
            numbers = range((low - fill.start) // size, -((fill.start - high) // size)) if low < high else ()
            for number in numbers:
                start = fill.start + number * size
                stop = min(start + size, end)
                mine = max(start, low), min(stop, high)
                place = target[position - first + mine[0] : position - first + mine[1]]
                direct = mine == (start, stop) and target.device == device
                if direct and device.type == "cpu":
                    provide(place.data_ptr(), place.nbytes)
                if not direct and not len(scratch):
                    scratch = torch.empty(size, dtype=target.dtype, device=device)
                if direct or held != number:
                    block = place if direct else scratch[: stop - start]
                    for own, (_, one) in zip(seeds, fill.operations, strict=True):
                        one.run(block, generator, own + number)
                if not direct:
                    place.copy_(scratch[mine[0] - start : mine[1] - start])
                    held = number
            position += length
