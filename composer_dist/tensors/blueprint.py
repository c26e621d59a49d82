"""Tensors that consist of slices of stored tensors.

A checkpoint may store a tensor in pieces, fused with others, transposed or permuted. A *blueprint* is a
tensor without values that records the elements of stored tensors it consists of, as *boxes*: each is a
rectangle of the blueprint, with an offset and strides in a stored tensor. Functions that only move elements
(cat, stack, chunk, transpose, reshape and so on) turn blueprints into blueprints, so running a library's own
conversion on blueprints shows what to read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Self

import torch

from composer_dist.errors import CheckpointValueError
from composer_dist.tensors.parts import Dims, contiguous_strides
from composer_dist.wording import listed


@dataclass(frozen=True)
class Box:
    """A rectangle of a tensor, whose elements are `strides` apart in a stored tensor."""

    source: str
    """The stored tensor's name."""
    start: Dims
    sizes: Dims
    offset: int
    """The number of the first element in the stored tensor, in row-major order."""
    strides: Dims

    def narrow(self, dim: int, low: int, high: int) -> Box | None:
        """The part with indices [low, high) in a dimension of the tensor; None if there is none."""
        first, last = max(self.start[dim], low), min(self.start[dim] + self.sizes[dim], high)
        if first >= last:
            return None
        if last - first == self.sizes[dim]:
            return self
        return replace(
            self,
            start=_splice(self.start, dim, 1, first),
            sizes=_splice(self.sizes, dim, 1, last - first),
            offset=self.offset + (first - self.start[dim]) * self.strides[dim],
        )

    def each(self, dim: int) -> Iterator[Box]:
        """Boxes with one index each in a dimension."""
        indices = range(self.start[dim], self.start[dim] + self.sizes[dim])
        yield from filter(None, (self.narrow(dim, index, index + 1) for index in indices))

    def moved(self, dim: int, by: int) -> Box:
        """The box at other indices in a dimension of the tensor."""
        return replace(self, start=_splice(self.start, dim, 1, self.start[dim] + by))

    def spliced(self, dim: int, count: int, *new: tuple[int, int, int]) -> Box:
        """The box with `count` dimensions replaced by `new` ones, each with its start, size and stride."""
        starts, sizes, strides = zip(*new, strict=True) if new else ((), (), ())
        return replace(
            self,
            start=_splice(self.start, dim, count, *starts),
            sizes=_splice(self.sizes, dim, count, *sizes),
            strides=_splice(self.strides, dim, count, *strides),
        )


class Blueprint(torch.Tensor):
    """A tensor on the meta device that records the slices it consists of."""

    boxes: tuple[Box, ...]
    dims: Dims
    """The shape, which torch takes much longer to give."""

    @classmethod
    def stored(cls, name: str, shape: Dims, dtype: torch.dtype) -> Self:
        """All of the stored tensor `name`."""
        whole = Box(name, (0,) * len(shape), shape, 0, contiguous_strides(shape))
        return cls.made_of((whole,) if prod(shape) else (), shape, dtype)

    @classmethod
    def made_of(cls, boxes: Sequence[Box], shape: Dims, dtype: torch.dtype) -> Self:
        """A tensor that consists of these boxes."""
        made = torch.empty(shape, dtype=dtype, device="meta").as_subclass(cls)
        made.boxes, made.dims = tuple(boxes), tuple(shape)
        return made

    @property
    def source(self) -> str | None:
        """The name of the stored tensor that this is all of; None if it is anything else."""
        if len(self.boxes) != 1:
            return None
        name = self.boxes[0].source
        same = Blueprint.stored(name, tuple(self.shape), self.dtype).boxes == self.boxes
        return name if same else None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run functions that move elements or return shapes; refuse those that need values."""
        if rule := _RULES.get(func.__name__):
            return rule(*args, **(kwargs or {}))
        untyped: Any = super()
        result = untyped.__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, torch.Tensor) and func.__name__ != "as_subclass":
            return cls._computed(func.__name__, result, [*args, *(kwargs or {}).values()])
        return result

    @classmethod
    def _computed(cls, function: str, result: torch.Tensor, operands: Sequence[Any]) -> torch.Tensor:
        raise CheckpointValueError(f"it computes with {function}, which needs values")


class TracedBlueprint(Blueprint):
    """A blueprint that also allows computation, whose result records only the stored tensors' names."""

    @property
    def sources(self) -> set[str]:
        """The names of the stored tensors that it consists of."""
        return {box.source for box in self.boxes}

    @property
    def computed(self) -> bool:
        """Whether its elements are computed from the stored ones."""
        return any(box.offset < 0 for box in self.boxes)

    @classmethod
    def _computed(cls, function: str, result: torch.Tensor, operands: Sequence[Any]) -> torch.Tensor:
        names = sorted(set(_sources(operands)))
        shape = tuple(result.shape)
        anywhere = [Box(name, (0,) * len(shape), shape, -1, (0,) * len(shape)) for name in names]
        return cls.made_of(anywhere, shape, result.dtype)


def _sources(operands: Sequence[Any]) -> Iterator[str]:
    for operand in operands:
        if isinstance(operand, Blueprint):
            yield from (box.source for box in operand.boxes)
        elif isinstance(operand, (list, tuple)):
            yield from _sources(operand)


def reshape(boxes: Sequence[Box], old: Dims, new: Dims) -> list[Box]:
    """The boxes of a tensor of shape `old` after it has been reshaped to `new`."""
    if prod(old) == 0:
        return []
    found, at, left, right = list(boxes), 0, 0, 0
    while left < len(old) or right < len(new):
        # The next dimensions on both sides with the same number of elements.
        group, wanted = list(old[left : left + 1]), list(new[right : right + 1])
        while prod(group) != prod(wanted):
            side, shape, start = (group, old, left) if prod(group) < prod(wanted) else (wanted, new, right)
            side.append(shape[start + len(side)])
        left, right = left + len(group), right + len(wanted)
        if group != wanted:
            for number in reversed(range(1, len(group))):  # merge them into one, from the last
                inner = prod(group[number:])
                found = [one for box in found for one in _merge(box, at + number - 1, inner)]
            for number in range(1, len(wanted)) if group else ():
                inner = prod(wanted[number:])
                found = [one for box in found for one in _split(box, at + number - 1, inner)]
            if bool(group) != bool(wanted):
                found = [box.spliced(at, 0, (0, 1, 0)) if wanted else box.spliced(at, 1) for box in found]
        at += len(wanted)
    return found


def _merge(box: Box, dim: int, inner: int) -> Iterator[Box]:
    """Merge `dim` and the next dimension, of size `inner`."""
    start, size, stride = (field[dim : dim + 2] for field in (box.start, box.sizes, box.strides))
    full = size[1] == inner
    if size[0] > 1 and not (full and (inner == 1 or stride[0] == stride[1] * inner)):
        for one in box.each(dim):
            yield from _merge(one, dim, inner)
        return
    merged = stride[0] if inner == 1 else stride[1]
    yield box.spliced(dim, 2, (start[0] * inner + start[1], size[0] * size[1], merged))


def _split(box: Box, dim: int, inner: int) -> Iterator[Box]:
    """Split a dimension into two, the second of size `inner`."""
    start, size, stride = box.start[dim], box.sizes[dim], box.strides[dim]
    border = (start // inner + 1) * inner
    if start % inner == 0 and size % inner == 0:
        places, sizes = (start // inner, 0), (size // inner, inner)
    elif start + size <= border:
        places, sizes = divmod(start, inner), (1, size)
    else:
        whole = (start + size) // inner * inner if start % inner == 0 else border
        for part in filter(None, (box.narrow(dim, start, whole), box.narrow(dim, whole, start + size))):
            yield from _split(part, dim, inner)
        return
    outer, within = zip(places, sizes, (stride * inner, stride), strict=True)
    yield box.spliced(dim, 1, outer, within)


def _splice(values: Dims, dim: int, count: int, *new: int) -> Dims:
    return (*values[:dim], *new, *values[dim + count :])


# Functions that move elements, with the arguments of torch's functions.


def _cat(tensors: Sequence[Blueprint], dim: int = 0) -> Blueprint:
    first = tensors[0]
    dim, at = dim % first.ndim, 0
    boxes: list[Box] = []
    for one in tensors:
        if _splice(tuple(one.shape), dim, 1) != _splice(tuple(first.shape), dim, 1):
            shapes = listed(list(dict.fromkeys(tuple(each.shape) for each in tensors)), 4)
            raise CheckpointValueError(f"it joins tensors of shapes {shapes}")
        boxes += [box.moved(dim, at) for box in one.boxes]
        at += one.shape[dim]
    return type(first).made_of(boxes, _splice(tuple(first.shape), dim, 1, at), first.dtype)


def _stack(tensors: Sequence[Blueprint], dim: int = 0) -> Blueprint:
    return _cat([_unsqueeze(one, dim) for one in tensors], dim)


def _narrow(tensor: Blueprint, dim: int, start: int, length: int) -> Blueprint:
    dim %= tensor.ndim
    parts = (box.narrow(dim, start, start + length) for box in tensor.boxes)
    boxes = [box.moved(dim, -start) for box in parts if box]
    return type(tensor).made_of(boxes, _splice(tuple(tensor.shape), dim, 1, length), tensor.dtype)


def _split_sizes(tensor: Blueprint, split_size_or_sections: Any, dim: int = 0) -> tuple[Blueprint, ...]:
    size, sections = tensor.shape[dim], split_size_or_sections
    if isinstance(sections, int):
        sections = [min(sections, size - at) for at in range(0, size, sections)]
    if sum(sections) != size:
        raise CheckpointValueError(f"it splits {size} rows into {list(sections)}")
    return tuple(_narrow(tensor, dim, sum(sections[:i]), length) for i, length in enumerate(sections))


def _chunk(tensor: Blueprint, chunks: int, dim: int = 0) -> tuple[Blueprint, ...]:
    return _split_sizes(tensor, max(1, -(-tensor.shape[dim] // chunks)), dim)


def _unbind(tensor: Blueprint, dim: int = 0) -> tuple[Blueprint, ...]:
    return tuple(_squeeze(_narrow(tensor, dim, index, 1), dim) for index in range(tensor.shape[dim]))


def _permute(tensor: Blueprint, *dims: Any) -> Blueprint:
    order = [dim % tensor.ndim for dim in (dims[0] if isinstance(dims[0], (tuple, list)) else dims)]

    def ordered(values: Sequence[int]) -> Dims:
        return tuple(values[dim] for dim in order)

    boxes = [
        replace(box, start=ordered(box.start), sizes=ordered(box.sizes), strides=ordered(box.strides))
        for box in tensor.boxes
    ]
    return type(tensor).made_of(boxes, ordered(tensor.shape), tensor.dtype)


def _transpose(tensor: Blueprint, dim0: int, dim1: int) -> Blueprint:
    order = list(range(tensor.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permute(tensor, order)


def _reshape(tensor: Blueprint, *shape: Any) -> Blueprint:
    wanted = list(shape[0] if isinstance(shape[0], (tuple, list)) else shape)
    if -1 in wanted:
        wanted[wanted.index(-1)] = tensor.numel() // max(1, -prod(wanted))
    if prod(wanted) != tensor.numel():
        raise CheckpointValueError(f"it reshapes {tuple(tensor.shape)} to {tuple(wanted)}")
    new = tuple(wanted)
    return type(tensor).made_of(reshape(tensor.boxes, tuple(tensor.shape), new), new, tensor.dtype)


def _unsqueeze(tensor: Blueprint, dim: int) -> Blueprint:
    shape = list(tensor.shape)
    shape.insert(dim % (tensor.ndim + 1), 1)
    return _reshape(tensor, shape)


def _squeeze(tensor: Blueprint, dim: int | None = None) -> Blueprint:
    dims = range(tensor.ndim) if dim is None else [dim % tensor.ndim]
    return _reshape(tensor, [size for d, size in enumerate(tensor.shape) if d not in dims or size != 1])


def _getitem(tensor: Blueprint, index: Any) -> Blueprint:
    found, dim = tensor, 0
    every = index if isinstance(index, tuple) else (index,)
    for number, one in enumerate(every):
        if one is Ellipsis:
            dim = found.ndim - (len(every) - number - 1)
        elif isinstance(one, slice) and one.step in (None, 1):
            low, high, _ = one.indices(found.shape[dim])
            found, dim = _narrow(found, dim, low, max(0, high - low)), dim + 1
        elif isinstance(one, int):
            found = _squeeze(_narrow(found, dim, one % found.shape[dim], 1), dim)
        else:
            raise CheckpointValueError(f"it indexes with {one!r}")
    return found


def _same(tensor: Blueprint, *args: Any, **kwargs: Any) -> Blueprint:
    return tensor


_RULES: dict[str, Callable[..., Any]] = {
    "cat": _cat,
    "concat": _cat,
    "stack": _stack,
    "narrow": _narrow,
    "split": _split_sizes,
    "chunk": _chunk,
    "unbind": _unbind,
    "permute": _permute,
    "transpose": _transpose,
    "t": lambda tensor: _transpose(tensor, 0, -1),
    "reshape": _reshape,
    "view": _reshape,
    "flatten": lambda tensor: _reshape(tensor, -1),
    "squeeze": _squeeze,
    "unsqueeze": _unsqueeze,
    "__getitem__": _getitem,
    "contiguous": _same,
    "clone": _same,
    "detach": _same,
}
