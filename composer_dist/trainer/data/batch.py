"""Batches of any structure: their size, cutting them, moving them to a device.

A batch is a tensor, or a mapping, sequence, named tuple or dataclass of batches; leaves of another
kind are kept as they are. The samples are dimension 0 of every tensor that has a dimension.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from composer_dist.errors import ParallelismValueError


def num_samples(batch: Any) -> int:
    """The size of dimension 0 of the first tensor that has one."""
    for tensor in tensors(batch):
        if tensor.ndim:
            return tensor.shape[0]
    raise ParallelismValueError(
        f"A batch of type {type(batch).__name__} has no tensor whose first dimension could be its samples."
    )


def num_tokens(batch: Any) -> int:
    """The tokens of a Hugging Face batch, without padding if there is a mask; 0 for any other batch."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(ids, Tensor):
        return 0
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        return int(mask.count_nonzero())
    return ids.numel()


def split(batch: Any, count: int) -> list[Any]:
    """At most `count` parts, in order, whose sizes differ by at most one sample; none is empty."""
    if count == 1:
        return [batch]
    sizes = {tensor.shape[0] for tensor in tensors(batch) if tensor.ndim}
    if len(sizes) > 1:
        raise ParallelismValueError(
            "A batch cannot be cut into microbatches: its tensors differ in their first dimension, "
            f"the samples: {sorted(sizes)}."
        )
    samples = num_samples(batch)
    bounds = [samples * part // count for part in range(count + 1)]

    def part(first: int, end: int) -> Any:
        def cut(leaf: Any) -> Any:
            return leaf[first:end] if isinstance(leaf, Tensor) and leaf.ndim else leaf

        return map_leaves(cut, batch)

    return [part(first, end) for first, end in pairwise(bounds) if end > first]


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on `device`, copied asynchronously from pinned memory."""

    def move(leaf: Any) -> Any:
        return leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf

    return map_leaves(move, batch)


def tensors(batch: Any) -> Iterator[Tensor]:
    """All tensors of a batch."""
    found: list[Tensor] = []

    def collect(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            found.append(leaf)
        return leaf

    map_leaves(collect, batch)
    yield from found


def map_leaves(fn: Callable[[Any], Any], batch: Any) -> Any:
    """A batch of the same structure with `fn` applied to its leaves; the batch stays as it is."""
    if isinstance(batch, MutableMapping):
        mapped = copy.copy(batch)  # keeps the class: a BatchEncoding, say
        for key, value in batch.items():
            mapped[key] = map_leaves(fn, value)
        return mapped
    if isinstance(batch, Mapping):
        return {key: map_leaves(fn, value) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        items = [map_leaves(fn, item) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        values = {
            field.name: map_leaves(fn, getattr(batch, field.name))
            for field in dataclasses.fields(batch)
            if field.init
        }
        return dataclasses.replace(batch, **values)
    return fn(batch)
