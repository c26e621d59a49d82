"""The collectives of tensor parallelism, differentiable, also twice.

Each one changes how the ranks of a group hold an activation, and its backward reverses the change for the
gradient. A *whole* activation and its gradient are equal on all ranks; of a *cut* one each rank has a part;
a *partial* one is the sum of what the ranks have.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from composer_dist import _torch
from composer_dist.distributed.ranks.reports import reason_of_loss
from composer_dist.errors import ParallelismRuntimeError, ParallelismValueError
from composer_dist.tensors.parts import chunk

SEQUENCE = -2
"""The dimension of positions in an activation `(..., positions, features)`."""


def copy(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Whole, for work that the ranks divide: the gradient is summed."""
    return _apply(tensor, lambda whole: whole.view_as(whole), lambda gradient: total(gradient, mesh))


def total(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Partial to whole: an all-reduce."""
    return _apply(tensor, lambda partial: _all_reduce(partial, mesh), lambda gradient: copy(gradient, mesh))


def split(tensor: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """Whole to cut along `dim`; the gradient is gathered."""
    size = tensor.shape[dim]
    return _apply(
        tensor,
        lambda whole: _part(whole, dim, mesh).clone(),
        lambda gradient: gather(gradient, dim, size, mesh),
    )


def gather(tensor: Tensor, dim: int, size: int, mesh: DeviceMesh) -> Tensor:
    """Cut along `dim`, of `size` in all, to whole; the gradient, equal on all ranks, is cut."""
    return _apply(
        tensor, lambda part: _all_gather(part, dim, size, mesh), lambda gradient: split(gradient, dim, mesh)
    )


def gather_partial(tensor: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """As `gather`, of equal parts, where the gradient is partial: it is reduced and scattered."""
    return _apply(
        tensor,
        lambda part: _all_gather(part, dim, part.shape[dim] * mesh.size(), mesh),
        lambda gradient: scatter_total(gradient, dim, mesh),
    )


def scatter_total(tensor: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """Partial to cut along `dim` in equal parts: a reduce-scatter."""
    return _apply(
        tensor,
        lambda partial: _reduce_scatter(partial, dim, mesh),
        lambda gradient: gather_partial(gradient, dim, mesh),
    )


def _apply(
    tensor: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
) -> Tensor:
    if _torch.is_transforming():
        raise ParallelismRuntimeError(
            "torch.func's transforms (vmap, grad) cannot pass a collective of tensor parallelism; leave the "
            "modules inside of the transform whole: Rule(..., tp='replicate')."
        )
    result: Tensor = _Collective.apply(tensor, forward, backward)  # type: ignore[no-untyped-call]
    return result


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.of_gradient = backward
        return forward(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.of_gradient(gradients[0]), None, None


def local(parameter: DTensor) -> Tensor:
    """This rank's part of a DTensor; its gradient is a DTensor laid out like the parameter.

    Nothing is communicated. Torch's `to_local` computes the gradient's stride as if all parts were equal.
    """
    result: Tensor = _Local.apply(parameter)  # type: ignore[no-untyped-call]
    return result


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.mesh, ctx.placements = parameter.device_mesh, parameter.placements
        ctx.shape, ctx.stride = parameter.shape, parameter.stride()
        part: Tensor = parameter.to_local()
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        part = gradients[0].contiguous()
        return DTensor.from_local(
            part, ctx.mesh, ctx.placements, run_check=False, shape=ctx.shape, stride=ctx.stride
        )


def require_even(tensor: Tensor, mesh: DeviceMesh, dim: int = SEQUENCE) -> None:
    """Refuse to cut a number of positions that the ranks cannot share evenly.

    Raises:
        ParallelismValueError: names the number.
    """
    if tensor.shape[dim] % mesh.size():
        raise ParallelismValueError(
            f"Sequence parallelism cannot divide the {tensor.shape[dim]} positions of an activation of shape "
            f"{tuple(tensor.shape)} evenly among {mesh.size()} ranks; pad the sequences to a multiple of "
            f"tp={mesh.size()}, or leave sequence_parallel out."
        )


# These are functional collectives: they leave their input as it is, torch.compile knows them, and selective
# checkpointing keeps their results.


def _reached(collective: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """The result of a collective; if it fails because another rank has ended, the error names that rank."""
    try:
        return collective(*arguments)
    except RuntimeError as error:
        if (reason := reason_of_loss(error, "a collective of tensor parallelism")) is None:
            raise
        raise reason from None


def _all_reduce(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    return _reached(_torch.all_reduced, tensor.contiguous(), mesh.get_group().group_name)


def _part(tensor: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    first, last = chunk(tensor.shape[dim], mesh.size(), mesh.get_local_rank())
    return tensor.narrow(dim, first, last - first)


def _all_gather(tensor: Tensor, dim: int, size: int, mesh: DeviceMesh) -> Tensor:
    """The whole of parts as `chunk` cuts them, so the last ones may be smaller."""
    largest, _ = chunk(size, mesh.size(), 1)
    missing = largest - tensor.shape[dim]
    if missing:
        shape = list(tensor.shape)
        shape[dim] = missing
        tensor = torch.cat([tensor, tensor.new_zeros(shape)], dim)
    gathered = _reached(_torch.all_gathered, tensor.contiguous(), mesh.size(), mesh.get_group().group_name)
    return torch.cat(gathered.chunk(mesh.size()), dim).narrow(dim, 0, size).contiguous()


def _reduce_scatter(tensor: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    require_even(tensor, mesh, dim)
    moved = tensor.movedim(dim, 0).contiguous()
    result = _reached(_torch.reduce_scattered, moved, mesh.size(), mesh.get_group().group_name)
    return result.movedim(0, dim).contiguous()
