"""Reductions of DTensors that torch computes differently than of whole tensors."""

from collections.abc import Iterable
from functools import cache, wraps
from math import inf, prod
from typing import Any

import torch
import torch.distributed as dist
from torch._decomp import decomposition_table
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate


def reduce_exactly() -> None:
    """Have reductions of shards, and losses on them, give what they give of whole tensors.

    The largest value of an empty part, which is also an infinity norm, is an error on that rank alone. torch
    adds up how many ranks have any, which is more than one where it is cast to a number, and norms of parts;
    it takes a sum over `dim=[]` for one over no dimension, and the mean of a loss over one part. By the table
    in which torch's own `loss_parallel` puts its operations. Since torch 2.2.
    """
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers

    def reduce(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if op in _LOSSES:
            return decomposition_table[op](*args, **kwargs)
        if op in _SUMS:
            whole = args[0] if _sums_up(args[0]) else _replicated(args[0])
            args = (whole, *[dims or [*range(whole.ndim)] for dims in args[1:2]], *args[2:])
        if op in _LARGEST or (op in _NORMS and any(not 0 <= order < inf for order in args[1:2])):
            many = isinstance(args[0], (list, tuple))
            args = ([*map(_evened, args[0])] if many else _evened(args[0]), *args[1:])
        handlers.pop(op, None)
        try:
            result = op(*args, **kwargs)
        finally:
            handlers[op] = reduce
        return _replicated(result) if op in _ANY and _is_partial(result) else result

    handlers.update(dict.fromkeys(_ANY | _LARGEST | _NORMS | _SUMS | _LOSSES, reduce))


def average_gradients_of_whole(meshes: Iterable[DeviceMesh]) -> None:
    """Have backward average over the ranks of these meshes what they compute with `full_tensor()` of a shard.

    torch takes this rank's part of its own gradient, which is right only where all ranks compute the same, as
    a penalty on parameters. Since torch 2.0.
    """
    _averaging.update(meshes)
    _replace_full_tensor()


_averaging: set[DeviceMesh] = set()
"""The meshes of parameters that are trained on different data on each rank."""


@cache
def _replace_full_tensor() -> None:
    whole_of = DTensor.full_tensor

    @wraps(whole_of)
    def full_tensor(tensor: DTensor, *, grad_placements: Any = None) -> torch.Tensor:
        whole = whole_of(tensor, grad_placements=grad_placements)
        trains = whole.requires_grad and grad_placements is None and not torch.compiler.is_compiling()
        if trains and (mesh := tensor.device_mesh) in _averaging:
            return _WithMeanGradient.apply(whole, mesh)  # type: ignore[no-any-return, no-untyped-call]
        return whole

    setattr(DTensor, "full_tensor", full_tensor)  # noqa: B010 - mypy refuses to assign a method


class _WithMeanGradient(torch.autograd.Function):
    """The identity; its gradient is the mean of those on all ranks of a mesh."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        ctx.mesh = mesh
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _MeanOfRanks.apply(gradients[0], ctx.mesh), None  # type: ignore[no-untyped-call]


class _MeanOfRanks(torch.autograd.Function):
    """The mean over the ranks of a mesh, and of its gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        ctx.mesh = mesh
        mean = (tensor / mesh.size()).contiguous()
        for dim in range(mesh.ndim):
            dist.all_reduce(mean, group=mesh.get_group(dim))
        return mean

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _MeanOfRanks.apply(gradients[0], ctx.mesh), None  # type: ignore[no-untyped-call]


def _evened(tensor: Any) -> Any:
    """The tensor itself, or the whole of it on every rank if its parts differ in size."""
    return _replicated(tensor) if isinstance(tensor, DTensor) and _is_uneven(tensor) else tensor


def _replicated(tensor: DTensor) -> DTensor:
    return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)


def _is_uneven(tensor: DTensor) -> bool:
    """Whether parts of a sharded tensor differ in size, so that some may be empty."""
    cuts = list(zip(tensor.placements, tensor.device_mesh.shape, strict=True))
    dims = {placement.dim for placement, _ in cuts if placement.is_shard()}  # type: ignore[attr-defined]
    return any(tensor.shape[dim] % prod(size for one, size in cuts if one.is_shard(dim)) for dim in dims)


def _is_partial(result: Any) -> bool:
    return isinstance(result, DTensor) and any(placement.is_partial() for placement in result.placements)


def _sums_up(tensor: DTensor) -> bool:
    """Whether the sum of its parts' sums is its sum, as it is not for norms of parts."""
    parts: list[Any] = [placement for placement in tensor.placements if placement.is_partial()]
    return all(type(one) is Partial and one.reduce_op in ("sum", "avg") for one in parts)


_aten = torch.ops.aten
_ANY = frozenset(getattr(_aten.any, overload) for overload in ("default", "dim", "dims"))
_LARGEST = frozenset(
    getattr(packet, overload)
    for packet in (
        getattr(_aten, name) for name in ["max", "min", "amax", "amin", "argmax", "argmin", "aminmax"]
    )
    for overload in packet.overloads()
    if overload in ("default", "dim")
)
_NORMS = frozenset([_aten.linalg_vector_norm.default, _aten._foreach_norm.Scalar])
_SUMS = frozenset([_aten.sum.default, _aten.sum.dim_IntList])
_LOSSES = frozenset(
    getattr(_aten, name + suffix).default
    for name in ["mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy"]
    for suffix in ("", "_backward")
) | {_aten.binary_cross_entropy_with_logits.default}
