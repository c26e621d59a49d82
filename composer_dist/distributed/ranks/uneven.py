"""Tensors whose shapes and dtypes differ between ranks."""

from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from composer_dist.distributed.ranks.process_group import device_for_facts, device_of_group
from composer_dist.distributed.ranks.reports import lost_named
from composer_dist.tensors.parts import as_bytes

_DTYPES = sorted({one for one in vars(torch).values() if isinstance(one, torch.dtype)}, key=str)
_DIMENSIONS = 64
"""The most that a torch tensor has."""


@lost_named("gather_uneven")
def gather_uneven(
    tensor: Tensor, present: bool = True, group: dist.ProcessGroup | None = None
) -> list[Tensor]:
    """The tensors of all ranks of a group that are present, in their order, on every rank.

    Args:
        tensor: of any shape and dtype.
        present: whether this rank's tensor is among the results.
        group: by default the default group, which must exist.

    Returns:
        The tensors, on this rank's tensor's device, without autograd history.
    """
    fact = [int(present), _DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape]
    fact += [0] * (3 + _DIMENSIONS - len(fact))
    facts = _gathered(torch.tensor(fact, device=device_for_facts(group)), group)
    kinds = [(bool(flag), _DTYPES[dtype], shape[:ndim]) for flag, dtype, ndim, *shape in map(_numbers, facts)]
    sizes = [dtype.itemsize * prod(shape) if flag else 0 for flag, dtype, shape in kinds]
    sent = torch.zeros(max(sizes), dtype=torch.uint8, device=device_of_group(group))
    if present:
        own = as_bytes(tensor.detach().contiguous().view(-1))
        sent[: len(own)] = own
    return [
        part[:size].view(dtype).view(shape).to(tensor.device)
        for part, size, (flag, dtype, shape) in zip(_gathered(sent, group), sizes, kinds, strict=True)
        if flag
    ]


def _numbers(fact: Tensor) -> list[int]:
    numbers: list[int] = fact.tolist()
    return numbers


def _gathered(tensor: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor, group)
    return parts
