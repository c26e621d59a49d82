"""Norms of many tensors at once, each taken as if it were whole.

A shard knows a part of its tensor's norm only. The parts' squares are summed over the ranks that hold the
tensor, all tensors of one sharding in one collective.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from composer_dist import _torch
from composer_dist.distributed.clipping import local_gradient, sharding_of

Part = tuple[torch.Tensor, torch.Tensor | None]
"""A tensor that tells the sharding, and this rank's part of the values; None where it has none."""


@torch.no_grad()
def norms(parts: Mapping[str, Part]) -> dict[str, torch.Tensor]:
    """The 2-norm of each whole tensor, by name; a collective with the same names on every rank.

    Returns:
        Plain 0-dim float32 tensors, equal on all ranks.
    """
    if not parts:
        return {}
    likes = [like for like, _ in parts.values()]
    squares = _squares([values for _, values in parts.values()], likes[0].device)
    total = _summed(squares, likes).sqrt().float()
    return dict(zip(parts, total.unbind(), strict=True))


def global_norm(norms: Iterable[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of tensors whose norms these are, as one vector; 0-dim float32."""
    each = [norm.double() for norm in norms]
    return torch.stack(each).square().sum().sqrt().float() if each else torch.tensor(0.0)


def part_of(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor or DTensor and this rank's part of it."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if hasattr(local, "dequantize") and type(local) not in (torch.Tensor, torch.nn.Parameter):
        local = local.dequantize()  # a low-bit optimizer's state
    return tensor, local


def gradient_part(parameter: torch.Tensor) -> Part:
    """A parameter and this rank's part of its gradient; a collective where that is a partial sum."""
    return parameter, next(iter(local_gradient(parameter)), None)


def _squares(values: Sequence[torch.Tensor | None], device: torch.device) -> torch.Tensor:
    """Each tensor's squared norm, float64, 0 for None."""
    squares = torch.zeros(len(values), dtype=torch.float64, device=device)
    alike: defaultdict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for index, value in enumerate(values):
        if value is not None and value.numel():
            alike[value.device, value.dtype].append(index)
    for (_, dtype), indices in alike.items():
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
        tensors = [value for index in indices if (value := values[index]) is not None]
        each = torch.stack(_torch._foreach_norm(tensors, 2, dtype=wide))
        squares[indices] = each.to(device, torch.float64).square()
    return squares


def _summed(squares: torch.Tensor, likes: Sequence[torch.Tensor]) -> torch.Tensor:
    """`squares` over all ranks that hold a part of the tensor at the same place of `likes`."""
    groups: defaultdict[tuple[DeviceMesh | None, tuple[int, ...]], list[int]] = defaultdict(list)
    for index, like in enumerate(likes):
        groups[sharding_of(like)].append(index)
    for (mesh, dims), indices in groups.items():
        if mesh is None or not dims:
            continue
        sums = squares[indices].to(mesh.device_type)
        for dim in dims:
            dist.all_reduce(sums, group=mesh.get_group(dim))
        squares[indices] = sums.to(squares.device)
    return squares
