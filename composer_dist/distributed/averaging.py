"""Tensors replaced by their means over ranks, in few collectives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import torch
import torch.distributed as dist

_BUCKET = 25 << 20
"""Bytes that travel in one collective, unless one tensor is larger: DDP's own size."""


@torch.no_grad()
def average(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Replace each tensor by its mean over the ranks of `group`, in its own dtype; a collective.

    Args:
        tensors: dense, and alike in number, shape, dtype and order on all ranks.
        group: None is the whole world.
    """
    for bucket in _buckets(tensors):
        flat = torch.cat([tensor.detach().flatten() for tensor in bucket])
        dist.all_reduce(flat, group=group)
        means = flat.div_(dist.get_world_size(group)).split([tensor.numel() for tensor in bucket])
        for tensor, mean in zip(bucket, means, strict=True):
            tensor.copy_(mean.view_as(tensor))


@torch.no_grad()
def average_gradients(parameters: Sequence[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Replace every gradient by its mean over the ranks of `group`, unused parameters' counting as zero.

    A parameter that no rank has used keeps no gradient. A collective; sparse gradients become dense.

    Args:
        parameters: the same, in the same order, on all ranks.
        group: None is the whole world.
    """
    if not parameters or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    used = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int32)
    used = used.to(parameters[0].device)
    dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
    somewhere = [parameter for parameter, one in zip(parameters, used.tolist(), strict=True) if one]
    for parameter in somewhere:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()
    average((parameter.grad for parameter in somewhere if parameter.grad is not None), group)


def _buckets(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Neighbours of one dtype and device, together no larger than a bucket."""
    for _, alike in groupby(tensors, key=lambda tensor: (tensor.dtype, tensor.device)):
        bucket: list[torch.Tensor] = []
        size = 0
        for tensor in alike:
            if bucket and size + tensor.nbytes > _BUCKET:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.nbytes
        yield bucket
