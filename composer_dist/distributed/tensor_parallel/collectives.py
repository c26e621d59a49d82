"""The collectives of tensor parallelism, differentiable.

Each goes from one way in which the ranks of a group hold an activation to another, and its backward
goes back. A *whole* activation is equal on all ranks and so is its gradient; of a *cut* one each rank
has a part; a *partial* one is the sum of what the ranks have.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from composer_dist import _torch
from composer_dist.errors import ParallelismValueError
from composer_dist.tensors.parts import chunk

SEQUENCE = -2
"""The dimension of positions in an activation `(..., positions, features)`."""


def copy(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Whole, for work that each rank does a part of: the gradient is summed."""
    return _apply(_Copy, tensor, mesh)


def total(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Partial to whole: an all-reduce."""
    return _apply(_Total, tensor, mesh)


def split(tensor: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """Whole to cut along `dim`; the gradient is gathered."""
    return _apply(_Split, tensor, dim, mesh)


def gather(tensor: Tensor, dim: int, size: int, mesh: DeviceMesh) -> Tensor:
    """Cut along `dim`, `size` long in all, to whole; the gradient, equal on all ranks, is cut."""
    return _apply(_Gather, tensor, dim, size, mesh)


def gather_partial(tensor: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """As `gather`, of equal parts, where the gradient is partial: it is reduced and scattered."""
    return _apply(_GatherPartial, tensor, dim, mesh)


def scatter_total(tensor: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """Partial to cut along `dim` in equal parts: a reduce-scatter."""
    return _apply(_ScatterTotal, tensor, dim, mesh)


def local(parameter: Tensor) -> Tensor:
    """This rank's part of a DTensor, whose gradient is a DTensor laid out like it; no communication.

    Torch's `to_local` works out the stride of the gradient from even parts.
    """
    return _apply(_Local, parameter)


def require_even(tensor: Tensor, mesh: DeviceMesh, dim: int = SEQUENCE) -> None:
    """Refuse to cut a number of positions that the ranks cannot share evenly.

    Raises:
        ParallelismValueError: names the number.
    """
    if tensor.shape[dim] % mesh.size():
        raise ParallelismValueError(
            f"Sequence parallelism cuts the {tensor.shape[dim]} positions of an activation of shape "
            f"{tuple(tensor.shape)} among {mesh.size()} ranks, which does not go evenly; pad the sequences "
            f"to a multiple of tp={mesh.size()}, or leave sequence_parallel out."
        )


def _apply(function: Any, *args: Any) -> Tensor:
    result: Tensor = function.apply(*args)
    return result


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _all_reduce(gradients[0], ctx.mesh), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, mesh: DeviceMesh) -> Tensor:
        return _all_reduce(tensor, mesh)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
        ctx.dim, ctx.size, ctx.mesh = dim, tensor.shape[dim], mesh
        return _part(tensor, dim, mesh).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _all_gather(gradients[0], ctx.dim, ctx.size, ctx.mesh), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, size: int, mesh: DeviceMesh) -> Tensor:
        ctx.dim, ctx.mesh = dim, mesh
        return _all_gather(tensor, dim, size, mesh)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _part(gradients[0], ctx.dim, ctx.mesh).contiguous(), None, None, None


class _GatherPartial(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
        ctx.dim, ctx.mesh = dim, mesh
        return _all_gather(tensor, dim, tensor.shape[dim] * mesh.size(), mesh)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _reduce_scatter(gradients[0], ctx.dim, ctx.mesh), None, None


class _ScatterTotal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
        ctx.dim, ctx.size, ctx.mesh = dim, tensor.shape[dim], mesh
        return _reduce_scatter(tensor, dim, mesh)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _all_gather(gradients[0], ctx.dim, ctx.size, ctx.mesh), None, None


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        assert isinstance(parameter, DTensor)
        ctx.mesh, ctx.placements = parameter.device_mesh, parameter.placements
        ctx.shape, ctx.stride = parameter.shape, parameter.stride()
        part: Tensor = parameter.to_local()
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return DTensor.from_local(
            gradients[0].contiguous(),
            ctx.mesh,
            ctx.placements,
            run_check=False,
            shape=ctx.shape,
            stride=ctx.stride,
        )


# Functional collectives: whoever gave the tensor may still use it, torch.compile knows them, and selective
# checkpointing keeps their results.


def _all_reduce(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    return _torch.all_reduced(tensor.contiguous(), mesh.get_group().group_name)


def _part(tensor: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    first, last = chunk(tensor.shape[dim], mesh.size(), mesh.get_local_rank())
    return tensor.narrow(dim, first, last - first)


def _all_gather(tensor: Tensor, dim: int, size: int, mesh: DeviceMesh) -> Tensor:
    """Parts as `chunk` cuts them, of which the last ones may be smaller, to the whole."""
    largest, _ = chunk(size, mesh.size(), 1)
    missing = largest - tensor.shape[dim]
    if missing:
        shape = list(tensor.shape)
        shape[dim] = missing
        tensor = torch.cat([tensor, tensor.new_zeros(shape)], dim)
    gathered = _torch.all_gathered(tensor.contiguous(), mesh.size(), mesh.get_group().group_name)
    return torch.cat(gathered.chunk(mesh.size()), dim).narrow(dim, 0, size).contiguous()


def _reduce_scatter(tensor: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    require_even(tensor, mesh, dim)
    moved = tensor.movedim(dim, 0).contiguous()
    result = _torch.reduce_scattered(moved, mesh.size(), mesh.get_group().group_name)
    return result.movedim(0, dim).contiguous()
