"""The parts of a tensor: ranges and rectangles of its elements, in row-major order."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch

Dims = tuple[int, ...]
_CORNERS = 64
"""Per box, in `covers`: those of a box that is cut in five dimensions, in all of its sums."""


def chunk(size: int, parts: int, part: int) -> tuple[int, int]:
    """The indices [first, last) of one part of a dimension, as `torch.chunk` cuts it."""
    step = -(-size // parts)
    return min(part * step, size), min((part + 1) * step, size)


@dataclass(frozen=True)
class Part:
    """The elements [first, last), in row-major order, of a window on a tensor."""

    shape: tuple[int, ...]
    """Of the full tensor; a dimension with groups counts as two."""
    window: tuple[tuple[int, int], ...]
    """[start, stop) in each dimension of `shape`."""
    first: int
    last: int

    @property
    def numel(self) -> int:
        """How many elements."""
        return self.last - self.first

    def of(self, tensor: torch.Tensor, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """The elements [start, stop) of the part, flat: a view where the tensor's layout allows, else a copy.

        Args:
            tensor: the full one, with any strides, device and dtype.
        """
        tensor = tensor.detach()
        view = tensor.view(self.shape) if tensor.is_contiguous() else _split(tensor, self.shape)
        stop = self.numel if stop is None else min(stop, self.numel)
        return elements(self._in_window(view), self.first + min(start, stop), self.first + stop)

    def put(self, tensor: torch.Tensor, values: torch.Tensor, start: int = 0) -> None:
        """Write the part's elements from `start` on, flat, into the full tensor.

        Args:
            tensor: contiguous, with any device and dtype.
        """
        put_elements(self._in_window(tensor.view(self.shape)), self.first + start, values)

    def _in_window(self, view: torch.Tensor) -> torch.Tensor:
        for dim, (low, high) in enumerate(self.window):
            view = view.narrow(dim, low, high - low)
        return view

    def runs(self) -> Iterator[tuple[int, int]]:
        """The contiguous runs of the part in the full tensor, in order: (first element, length)."""
        if not self.numel:
            return
        sizes = [high - low for low, high in self.window]
        outer = len(sizes)
        while outer and sizes[outer - 1] == self.shape[outer - 1]:
            outer -= 1
        outer = max(outer - 1, 0)  # dimensions before the last one that is cut, over which runs repeat
        length = prod(sizes[outer:])
        strides = [prod(self.shape[dim + 1 :]) for dim in range(len(sizes))]
        base = sum(low * stride for (low, _), stride in zip(self.window, strides, strict=True))
        for number in range(self.first // length, -(-self.last // length)):
            offset, rest = base, number
            for dim in reversed(range(outer)):
                rest, index = divmod(rest, sizes[dim])
                offset += index * strides[dim]
            start = max(self.first - number * length, 0)
            stop = min(self.last - number * length, length)
            yield offset + start, stop - start


def elements(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """The elements [start, stop) in row-major order: a view where the layout allows, else a copy."""
    if tensor.is_contiguous():
        return tensor.view(-1)[start:stop]
    if start >= stop:
        return tensor.new_empty(0)
    row = tensor.numel() // tensor.shape[0]
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        return elements(tensor[last], start - last * row, stop - last * row)
    parts = [tensor[first:last].reshape(-1).contiguous()]
    if start < first * row:
        parts.insert(0, elements(tensor[first - 1], start - (first - 1) * row, row))
    if stop > last * row:
        parts.append(elements(tensor[last], 0, stop - last * row))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def put_elements(tensor: torch.Tensor, start: int, values: torch.Tensor) -> None:
    """Write elements in row-major order, from number `start` on, into a tensor of any layout."""
    stop = start + values.numel()
    if tensor.is_contiguous():
        tensor.view(-1)[start:stop].copy_(values)
        return
    if start >= stop:
        return
    row = tensor.numel() // tensor.shape[0]
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        put_elements(tensor[last], start - last * row, values)
        return
    head, rows, tail = values.tensor_split((first * row - start, last * row - start))
    if head.numel():
        put_elements(tensor[first - 1], row - head.numel(), head)
    tensor[first:last].copy_(rows.view(tensor[first:last].shape))
    if tail.numel():
        put_elements(tensor[last], 0, tail)


def _split(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A view with one dimension unflattened, if `shape` has one more."""
    if tensor.ndim == len(shape):
        return tensor
    dim = next((d for d, size in enumerate(tensor.shape) if size != shape[d]), tensor.ndim - 1)
    split: torch.Tensor = tensor.unflatten(dim, shape[dim : dim + 2])
    return split


def rectangles(sizes: Sequence[int], first: int, last: int) -> Iterator[tuple[Dims, Dims]]:
    """The elements [first, last) of a tensor in row-major order, as rectangles: (corner, extent)."""
    if first >= last:
        return
    if not sizes:
        yield (), ()
        return
    inner = prod(sizes[1:])
    low, high = -(-first // inner), last // inner
    if low > high:  # within one row
        for corner, extent in rectangles(sizes[1:], first - high * inner, last - high * inner):
            yield (high, *corner), (1, *extent)
        return
    for corner, extent in rectangles(sizes[1:], first - (low - 1) * inner, inner) if first % inner else ():
        yield (low - 1, *corner), (1, *extent)
    if low < high:
        yield (low, *(0,) * (len(sizes) - 1)), (high - low, *sizes[1:])
    for corner, extent in rectangles(sizes[1:], 0, last - high * inner):
        yield (high, *corner), (1, *extent)


def covers(boxes: Iterable[tuple[Dims, Dims]], shape: Dims) -> bool:
    """Whether boxes, (corner, extent) each, contain every element of a tensor exactly once.

    The function that counts the boxes at an element is determined by its changes at the boxes' corners. They
    are summed one dimension after the other, minus those of the whole tensor; nothing may remain. The time is
    linear in the number of boxes: dimensions that no box cuts are left out, and boxes that have too many
    corners, which no mesh makes, are taken as wrong.
    """
    whole = (*((0, size) for size in shape),)
    placed = [(*zip(*box, strict=True),) for box in boxes]
    if any(len(box) != len(shape) for box in placed):
        return False
    cut = [dim for dim, span in enumerate(whole) if not span[1] or any(box[dim] != span for box in placed)]
    sums: dict[tuple[Dims, ...], int] = Counter((*(box[dim] for dim in cut),) for box in placed)
    whole = (*(whole[dim] for dim in cut),)
    sums[whole] = sums.get(whole, 0) - 1
    left = _CORNERS * (len(placed) + 1)
    for dim in range(len(cut)):
        ends: dict[tuple[Dims, ...], int] = Counter()
        for box, count in sums.items():
            first, size = box[dim]
            for end, sign in ((first, count), (first + size, -count)):
                ends[(*box[:dim], (end,), *box[dim + 1 :])] += sign
        sums = {key: count for key, count in ends.items() if count}
        left -= len(sums)
        if left < 0:
            return False
    return not any(sums.values())


def contiguous_strides(shape: Dims) -> Dims:
    """Strides of a tensor in row-major order, in elements."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A flat, contiguous tensor's bytes."""
    if tensor.numel() == 1:  # one of a single element is contiguous with any stride
        tensor = tensor.as_strided((1,), (1,))
    return tensor.view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)
