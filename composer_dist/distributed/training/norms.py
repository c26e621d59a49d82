"""Norms of gradients and other tensors, sharded or plain, of one mesh or several; clipping.

A shard gives only its part of a tensor's norm. The parts are summed over the ranks that hold the tensor,
for all tensors that are sharded alike in one collective.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from composer_dist import _torch
from composer_dist.distributed.prepared import named_parameters_canonical
from composer_dist.errors import ParallelismValueError

Parameters = nn.Module | torch.Tensor | Iterable[torch.Tensor]


_EPSILON = 1e-6  # from torch.nn.utils.clip_grad_norm_


@torch.no_grad()
def clip_grad_norm(model_or_parameters: Parameters, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale all gradients together so that their global norm is at most `max_norm`.

    Sharded and plain parameters, of one mesh or several, count as one vector, each element once.
    Every rank must call it with the same parameters; a gradient may be missing on some ranks only.

    Args:
        model_or_parameters: a model, whose parameters are all taken, or parameters.
        max_norm: the largest norm to leave; `math.inf` only measures.
        norm_type: the p of the p-norm, positive; `math.inf` for the largest absolute value.

    Returns:
        The norm before clipping, the same on every rank: a plain tensor, 0-dim, float32 (float64
        if a parameter is), on the first parameter's device. Where it is not finite it is returned
        as it is, and the gradients are scaled by what it gives, as torch does.

    Raises:
        ParallelismValueError: `norm_type` is not positive, or `max_norm` is negative.
    """
    norm_type, max_norm = float(norm_type), float(max_norm)
    if not norm_type > 0 or not max_norm >= 0:
        raise ParallelismValueError(
            f"clip_grad_norm needs norm_type > 0 and max_norm >= 0, not {norm_type} and {max_norm}."
        )
    parameters = _parameters(model_or_parameters)
    if not parameters:
        return torch.tensor(0.0)
    # Grouped by what the parameters are, not by which gradients exist: the collectives below are
    # then the same on every rank.
    groups: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[torch.Tensor]] = {}
    for parameter in parameters:
        groups.setdefault(sharding_of(parameter), []).extend(local_gradient(parameter))
    device = parameters[0].device
    sizes = [
        _reduce_power(_power(gradients, norm_type, device), norm_type, mesh, dims)
        for (mesh, dims), gradients in groups.items()
    ]
    total = torch.stack([size.to(device) for size in sizes])
    norm = total.amax() if math.isinf(norm_type) else total.sum() ** (1 / norm_type)
    double = any(parameter.dtype is torch.float64 for parameter in parameters)
    norm = norm.to(torch.float64 if double else torch.float32)
    scale = (max_norm / (norm + _EPSILON)).clamp(max=1.0)
    for tensors in _alike([gradient for group in groups.values() for gradient in group]):
        _torch.foreach_mul_(tensors, scale.to(tensors[0].device))
    return norm


@torch.no_grad()
def clip_grad_value(model_or_parameters: Parameters, max_value: float) -> None:
    """Limit every element of every gradient to [-max_value, max_value]; needs no communication."""
    for parameter in _parameters(model_or_parameters):
        for gradient in local_gradient(parameter):
            gradient.clamp_(-max_value, max_value)


def _parameters(model_or_parameters: Parameters) -> list[torch.Tensor]:
    """The parameters, each once, as shards where a model is given."""
    if isinstance(model_or_parameters, nn.Module):
        return [parameter for _, parameter in named_parameters_canonical(model_or_parameters)]
    if isinstance(model_or_parameters, torch.Tensor):
        return [model_or_parameters]
    return list(dict.fromkeys(model_or_parameters))


def local_gradient(parameter: torch.Tensor) -> list[torch.Tensor]:
    """This rank's part of the gradient, sharing its memory; nothing where there is none."""
    gradient = parameter.grad
    if gradient is None:
        return []
    if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
        return [gradient]
    if gradient.placements != parameter.placements:  # a partial sum, after tensor parallelism
        gradient = parameter.grad = gradient.redistribute(placements=parameter.placements)
    return [gradient.to_local()]


def sharding_of(parameter: torch.Tensor) -> tuple[DeviceMesh | None, tuple[int, ...]]:
    """The mesh dimensions over whose ranks a parameter's elements are spread."""
    if not isinstance(parameter, DTensor):
        return None, ()
    dims = (dim for dim, place in enumerate(parameter.placements) if not place.is_replicate())
    return parameter.device_mesh, tuple(dims)


def _alike(tensors: Iterable[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """Non-empty tensors by device and dtype, as the fused kernels want them."""
    alike: defaultdict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.numel():
            alike[tensor.device, tensor.dtype].append(tensor)
    return alike.values()


def _power(tensors: list[torch.Tensor], p: float, device: torch.device) -> torch.Tensor:
    """The p-th power of the tensors' common norm, or the norm itself for infinity; 0-dim.

    In float64, where a power of a float32 norm neither overflows nor loses digits.
    """
    norms = [torch.zeros(1, dtype=torch.float64, device=device)]
    for alike in _alike(tensors):
        half = alike[0].dtype in (torch.float16, torch.bfloat16)
        wide = torch.float32 if half else None
        each = torch.stack(_torch.foreach_norm(alike, p, dtype=wide))
        norms.append(each.to(device, torch.float64))
    norm = torch.cat(norms)
    return norm.amax() if math.isinf(p) else (norm**p).sum()


def _reduce_power(
    power: torch.Tensor, p: float, mesh: DeviceMesh | None, dims: tuple[int, ...]
) -> torch.Tensor:
    """`_power` over all ranks that hold a part: a sum, or for infinity a maximum."""
    if mesh is None:
        return power
    power = power.to(mesh.device_type)
    for dim in dims:
        if not math.isinf(p):
            dist.all_reduce(power, group=mesh.get_group(dim))
            continue
        # Backends differ in what the maximum of a number and nan is; a flag carries the nan.
        value = torch.stack([power.nan_to_num(nan=0.0, posinf=math.inf), power.isnan().to(power)])
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=mesh.get_group(dim))
        power = torch.where(value[1] > 0, torch.nan, value[0])
    return power


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
        each = torch.stack(_torch.foreach_norm(tensors, 2, dtype=wide))
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
