"""Batches of any structure: their size, cutting them, moving them to a device.

A batch is a tensor, or a mapping, sequence, named tuple or dataclass of batches; leaves of another
kind are kept as they are. The samples are dimension 0 of every tensor that has a dimension.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from composer_dist.errors import ParallelismValueError
from composer_dist.tensors.nested import map_tensors, tensors_in


def num_samples(batch: Any) -> int:
    """The size of dimension 0 of the first tensor that has one."""
    for tensor in tensors_in(batch):
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
    sizes = {tensor.shape[0] for tensor in tensors_in(batch) if tensor.ndim}
    if len(sizes) > 1:
        raise ParallelismValueError(
            "A batch cannot be cut into microbatches: its tensors differ in their first dimension, "
            f"the samples: {sorted(sizes)}."
        )
    samples = num_samples(batch)
    bounds = [samples * part // count for part in range(count + 1)]

    def part(first: int, end: int) -> Any:
        return map_tensors(lambda _, tensor: tensor[first:end] if tensor.ndim else tensor, batch)

    return [part(first, end) for first, end in pairwise(bounds) if end > first]


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on `device`, copied asynchronously from pinned memory."""
    return map_tensors(lambda _, tensor: tensor.to(device, non_blocking=True), batch)
