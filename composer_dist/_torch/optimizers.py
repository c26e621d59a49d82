"""Steps of torch's optimizers."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from importlib import import_module
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

# Muon, whose step calls a function on each matrix. Since torch 2.9.
from torch.optim import _muon

from composer_dist._torch.tensors import local_box


@cache
def step_on_parts() -> None:
    """Have torch's optimizers that compute by element do so on the parts of DTensors, with the same bits.

    Through DTensor each operation takes some ten microseconds a parameter, and milliseconds where a shape is
    new, because torch finds out by fake tensors how the result is cut: for 300 parameters, a first step in
    one piece (`foreach`) took three seconds. Replaces the functions that `step` calls. Since torch 2.0.
    """
    for name in (*_OF_ADAM, "adadelta", "adagrad", "asgd", "rmsprop", "rprop", "sgd"):
        module = import_module(f"torch.optim.{name}")
        setattr(module, name, _on_parts(getattr(module, name)))
    muon: Any = _muon
    muon._zeropower_via_newtonschulz = _on_whole(muon._zeropower_via_newtonschulz)


_OF_ADAM = ("adam", "adamax", "adamw", "nadam", "radam")


def _on_parts(step: Callable[..., None]) -> Callable[..., None]:
    @wraps(step)
    def call(params: list[Any], *lists: list[Any], **options: Any) -> None:
        cut = [one for one in params if isinstance(one, DTensor)]
        given = (params, *lists)
        if not cut or torch.compiler.is_compiling() or not _are_alike(given, options):
            return step(*given, **options)
        parts = [[one._local_tensor if isinstance(one, DTensor) else one for one in each] for each in given]
        before = [list(each) for each in parts]
        torch.autograd.graph.increment_version(cut)
        step(*parts, **options)
        for each, now, then in zip(given, parts, before, strict=True):  # a step may put state into its lists
            for index, (new, old) in enumerate(zip(now, then, strict=True)):
                if new is not old:
                    gradient = lists[0][index]
                    is_cut = isinstance(gradient, DTensor)
                    each[index] = DTensor(new, gradient._spec, requires_grad=False) if is_cut else new

    return call


def _on_whole(orthogonalized: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Muon's iteration on a whole matrix.

    DTensor rounds the products of the parts to bfloat16 before it sums them, in each of the five steps, so
    that an update differs by some percent from that of one process. On all ranks the result is the same.
    """

    @wraps(orthogonalized)
    def call(matrix: Any, *settings: Any) -> Any:
        is_cut = isinstance(matrix, DTensor) and not any(one.is_partial() for one in matrix.placements)
        if not is_cut or torch.compiler.is_compiling():
            return orthogonalized(matrix, *settings)
        result = orthogonalized(matrix.bfloat16().full_tensor(), *settings)
        sizes, corner = local_box(matrix)
        part = result[tuple(slice(first, first + size) for first, size in zip(corner, sizes, strict=True))]
        meta = TensorMeta(matrix.shape, matrix.stride(), result.dtype)
        spec = DTensorSpec(matrix.device_mesh, matrix.placements, meta)
        return DTensor(part.contiguous(), spec, requires_grad=False)

    return call


def _are_alike(lists: Sequence[Sequence[Any]], options: Mapping[str, Any]) -> bool:
    """Whether all DTensors are cut as their parameters are, with no whole tensors among them but counts."""
    if options.get("differentiable") or any(isinstance(one, DTensor) for one in options.values()):
        return False
    full = [one for one in lists if one]
    if any(len(one) != len(lists[0]) for one in full):
        return False
    specs = [one._spec if isinstance(one, DTensor) else None for one in full[0]]
    return all(_is_cut_alike(specs, each) for each in full[1:])


def _is_cut_alike(specs: Sequence[DTensorSpec | None], tensors: Sequence[Any]) -> bool:
    """Whether tensors are cut as parameters with these specifications are; None is of a whole one."""
    for spec, one in zip(specs, tensors, strict=True):
        if isinstance(one, DTensor):
            own = one._spec
            if own is not spec and (
                spec is None or (own.placements, own.mesh) != (spec.placements, spec.mesh)
            ):
                return False
        elif spec is not None and isinstance(one, torch.Tensor) and one.dim():
            return False
    return True
