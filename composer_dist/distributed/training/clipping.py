"""Clipping of gradients; norms of gradients and other tensors, sharded or plain, of one mesh or several.

A shard gives only its part of a tensor's norm. The parts are summed over the ranks that hold the tensor,
for all tensors that are sharded alike in one collective.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from composer_dist import _torch
from composer_dist.distributed.former import refuse_former
from composer_dist.distributed.prepared import named_parameters_canonical
from composer_dist.distributed.ranks.reports import lost_named
from composer_dist.distributed.training.local_gradients import refuse_local
from composer_dist.errors import ParallelismValueError

Parameters = nn.Module | torch.Tensor | Iterable[torch.Tensor]

Part = tuple[torch.Tensor, torch.Tensor | None]
"""A tensor that says how it is sharded, and this rank's part of the values; None if it has none."""

_EPSILON = 1e-6  # from torch.nn.utils.clip_grad_norm_


@torch.no_grad()
@lost_named("clip_grad_norm")
def clip_grad_norm(model_or_parameters: Parameters, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale all gradients together so that their global norm is at most `max_norm`.

    Sharded and plain parameters, of one mesh or several, count as one vector, each element once.
    Every rank must call it with the same parameters; a gradient may be missing on some ranks only.

    Args:
        model_or_parameters: a model, whose parameters are all taken, or parameters.
        max_norm: the largest norm to leave; `math.inf` only measures.
        norm_type: the p of the p-norm, positive; `math.inf` for the largest absolute value.

    Returns:
        The norm before clipping, equal on all ranks: a plain 0-dim tensor, float32 (float64 if a parameter
        is), on the first parameter's device. A norm that is not finite is returned too, and the gradients
        are scaled by it, as in torch.

    Raises:
        ParallelismValueError: `norm_type` is not positive, or `max_norm` is negative.
        ParallelismRuntimeError: gradients are not averaged over the ranks yet, or these are parameters that
            the model had before it was prepared.
    """
    norm_type, max_norm = float(norm_type), float(max_norm)
    if not norm_type > 0 or not max_norm >= 0:
        raise ParallelismValueError(
            f"clip_grad_norm needs norm_type > 0 and max_norm >= 0, not {norm_type} and {max_norm}."
        )
    parameters = _parameters(model_or_parameters, "clip_grad_norm")
    if not parameters:
        return torch.tensor(0.0)
    refuse_local(parameters, "clip_grad_norm would measure")
    parts = [gradient_part(parameter) for parameter in parameters]
    device = parameters[0].device
    powers = _powers([gradient for _, gradient in parts], norm_type, device)
    sizes = [
        _reduced(_combined(powers[indices], norm_type), norm_type, mesh, dims).to(device)
        for (mesh, dims), indices in _by_sharding(parameters).items()
    ]
    total = _combined(torch.stack(sizes), norm_type)
    norm = total if math.isinf(norm_type) else total ** (1 / norm_type)
    double = any(parameter.dtype is torch.float64 for parameter in parameters)
    norm = norm.to(torch.float64 if double else torch.float32)
    scale = (max_norm / (norm + _EPSILON)).clamp(max=1.0)
    for _, alike in _alike([gradient for _, gradient in parts]):
        _torch.foreach_mul_(alike, scale.to(alike[0].device))
    return norm


@torch.no_grad()
def clip_grad_value(model_or_parameters: Parameters, max_value: float) -> None:
    """Limit every element of every gradient to [-max_value, max_value].

    Every rank must call it: a partial sum, which tensor parallelism leaves, is reduced first.

    Raises:
        ParallelismValueError: `max_value` is negative.
        ParallelismRuntimeError: gradients are not averaged over the ranks yet, or these are parameters that
            the model had before it was prepared.
    """
    if not max_value >= 0:
        raise ParallelismValueError(f"clip_grad_value needs max_value >= 0, not {max_value}.")
    parameters = _parameters(model_or_parameters, "clip_grad_value")
    refuse_local(parameters, "clip_grad_value would limit")
    for parameter in parameters:
        if (gradient := local_gradient(parameter)) is not None:
            gradient.clamp_(-max_value, max_value)


def _parameters(model_or_parameters: Parameters, function: str) -> list[torch.Tensor]:
    """The parameters, each once, as shards where a model is given."""
    if isinstance(model_or_parameters, nn.Module):
        return [parameter for _, parameter in named_parameters_canonical(model_or_parameters)]
    if isinstance(model_or_parameters, torch.Tensor):
        model_or_parameters = [model_or_parameters]
    given = list(dict.fromkeys(model_or_parameters))
    refuse_former(given, function)
    return given


def local_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of the gradient, sharing its memory; None where there is none.

    Of a sparse one, which becomes coalesced, the rows that it has.
    """
    gradient = parameter.grad
    if gradient is not None and gradient.is_sparse:
        gradient = parameter.grad = gradient.coalesce()  # a row that is in it twice counts as their sum
        return gradient.values()
    if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
        return gradient
    if gradient.placements != parameter.placements:  # a partial sum, after tensor parallelism
        gradient = parameter.grad = gradient.redistribute(placements=parameter.placements)
    return gradient.to_local()


def gradient_part(parameter: torch.Tensor) -> Part:
    """A parameter and this rank's part of its gradient; a collective if that is a partial sum."""
    return parameter, local_gradient(parameter)


def part_of(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor or DTensor and this rank's part of it."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if hasattr(local, "dequantize") and type(local) not in (torch.Tensor, torch.nn.Parameter):
        local = local.dequantize()  # a low-bit optimizer's state
    return tensor, local


@torch.no_grad()
def norms(parts: Mapping[str, Part]) -> dict[str, torch.Tensor]:
    """The 2-norm of each whole tensor, by name: 0-dim, float32, equal on all ranks; a collective."""
    if not parts:
        return {}
    likes = [like for like, _ in parts.values()]
    squares = _powers([values for _, values in parts.values()], 2, likes[0].device)
    for (mesh, dims), indices in _by_sharding(likes).items():
        squares[indices] = _reduced(squares[indices], 2, mesh, dims).to(squares.device)
    return dict(zip(parts, squares.sqrt().float().unbind(), strict=True))


def global_norm(norms: Iterable[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of tensors whose norms these are, as one vector; 0-dim float32."""
    each = [norm.double() for norm in norms]
    return torch.stack(each).square().sum().sqrt().float() if each else torch.tensor(0.0)


Sharding = tuple[DeviceMesh | None, tuple[int, ...]]
"""A mesh and the dimensions over whose ranks a tensor's elements are spread."""


def _by_sharding(tensors: Iterable[torch.Tensor]) -> Mapping[Sharding, list[int]]:
    """Indices of the tensors that are sharded alike.

    It depends on the tensors, not on which gradients exist, so all ranks run the same collectives.
    """
    groups: defaultdict[Sharding, list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        sharding: Sharding = (None, ())
        if isinstance(tensor, DTensor):
            dims = (dim for dim, place in enumerate(tensor.placements) if not place.is_replicate())
            sharding = tensor.device_mesh, tuple(dims)
        groups[sharding].append(index)
    return groups


def _alike(tensors: Iterable[torch.Tensor | None]) -> Iterable[tuple[list[int], list[torch.Tensor]]]:
    """Indices and tensors, without empty ones, by device and dtype, as the fused kernels need them."""
    alike: defaultdict[object, tuple[list[int], list[torch.Tensor]]] = defaultdict(lambda: ([], []))
    for index, tensor in enumerate(tensors):
        if tensor is not None and tensor.numel():
            indices, group = alike[tensor.device, tensor.dtype]
            indices.append(index)
            group.append(tensor)
    return alike.values()


def _powers(values: Sequence[torch.Tensor | None], p: float, device: torch.device) -> torch.Tensor:
    """The p-th power of each tensor's norm, or for infinity the norm itself; 0 for None.

    In float64, where a power of a float32 norm neither overflows nor loses digits.
    """
    found = torch.zeros(len(values), dtype=torch.float64, device=device)
    for indices, alike in _alike(values):
        wide = torch.float32 if alike[0].dtype in (torch.float16, torch.bfloat16) else None
        each = torch.stack(_torch.foreach_norm(alike, p, dtype=wide)).to(device, torch.float64)
        found[indices] = each if math.isinf(p) else each**p
    return found


def _combined(powers: torch.Tensor, p: float) -> torch.Tensor:
    """The power of several tensors together."""
    return powers.amax() if math.isinf(p) else powers.sum()


def _reduced(powers: torch.Tensor, p: float, mesh: DeviceMesh | None, dims: tuple[int, ...]) -> torch.Tensor:
    """Powers over all ranks that hold a part: their sums, or for infinity their maxima."""
    if mesh is None:
        return powers
    powers = powers.to(mesh.device_type, copy=True)
    for dim in dims:
        if not math.isinf(p):
            dist.all_reduce(powers, group=mesh.get_group(dim))
            continue
        # Backends differ in what the maximum of a number and nan is; a flag carries the nan.
        value = torch.stack([powers.nan_to_num(nan=0.0, posinf=math.inf), powers.isnan().to(powers)])
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=mesh.get_group(dim))
        powers = torch.where(value[1] > 0, torch.nan, value[0])
    return powers
