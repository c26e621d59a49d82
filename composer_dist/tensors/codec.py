"""Codecs: how to convert tensors of a subclass into plain tensors and back.

A tensor subclass may store its value in several *inner* tensors: packed integers, scales, a table. Its codec
lists them, says which of them *follow the rows* (a rank's part of dimension 0 of the tensor needs the same
part of dimension 0 of these; the others are whole on every rank), and converts the tensor to and from a dense
one. `inner.py` uses codecs to allocate, deliver, compare, gather and load the inner tensors of shards; FSDP2
gathers shards by the class's own `fsdp_pre_all_gather` and `fsdp_post_all_gather`. The codecs of torchao's
classes are in `torchao.py`.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.tensors.parts import contiguous_strides

Flatten = Callable[[Tensor], tuple[Mapping[str, Tensor], Any]]
Unflatten = Callable[[Mapping[str, Tensor], Any, torch.Size], Tensor]


@dataclass(frozen=True)
class TensorCodec:
    """The functions for the tensors of one class; see `register_tensor_codec`."""

    rows: frozenset[str]
    to_dense: Callable[[Tensor], Tensor]
    from_dense: Callable[[Tensor, Tensor], Tensor]
    flatten: Flatten
    unflatten: Unflatten


codecs: dict[type[Tensor], TensorCodec] = {}
"""The registered codecs."""


def register_tensor_codec(
    cls: type[Tensor],
    *,
    rows: Collection[str],
    to_dense: Callable[[Tensor], Tensor],
    from_dense: Callable[[Tensor, Tensor], Tensor],
    flatten: Flatten | None = None,
    unflatten: Unflatten | None = None,
    replace: bool = False,
) -> None:
    """Support frozen parameters of a tensor subclass. Every rank must register the same codec.

    Args:
        cls: the exact class; subclasses need their own codecs. To be sharded it also needs FSDP2's
            `fsdp_pre_all_gather` and `fsdp_post_all_gather`.
        rows: names of the inner tensors that follow the rows: if dimension 0 of the tensor is cut in equal
            parts, dimension 0 of each of these is cut in as many parts.
        to_dense: returns the value as a plain tensor of the same shape and dtype.
        from_dense: `(dense, like)`; returns a tensor of the class with the value of `dense` and the settings
            (such as block sizes) of `like`, which is of the class and may be this rank's part.
        flatten: returns the inner tensors by name, and a context with everything else that the tensor
            consists of; None uses the class's own `__tensor_flatten__`.
        unflatten: the inverse, `(inner, context, shape)`, with the shape of the tensor or of a shard; None
            uses the class's own `__tensor_unflatten__`, with a contiguous outer stride.
        replace: replace the existing codec of the class.

    Raises:
        ParallelismTypeError: `cls` is not a subclass of Tensor, or lacks the two methods to use.
        ParallelismValueError: only one of `flatten` and `unflatten` is given, or `cls` already has a codec.
    """
    if not (isinstance(cls, type) and issubclass(cls, Tensor)) or cls in (Tensor, nn.Parameter):
        raise ParallelismTypeError(f"A codec needs a subclass of torch.Tensor, not {cls!r}.")
    if (flatten is None) != (unflatten is None):
        raise ParallelismValueError(f"{cls.__name__}: give both flatten and unflatten, or neither.")
    if flatten is None and not all(hasattr(cls, f"__tensor_{name}__") for name in ("flatten", "unflatten")):
        raise ParallelismTypeError(
            f"{cls.__name__} has no __tensor_flatten__ and __tensor_unflatten__; give flatten and unflatten."
        )
    if cls in codecs and not replace:
        raise ParallelismValueError(f"{cls.__name__} already has a codec; pass replace=True to replace it.")
    unflatten = unflatten or made_by(cls)
    codecs[cls] = TensorCodec(frozenset(rows), to_dense, from_dense, flatten or made_of, unflatten)


def made_of(tensor: Any) -> tuple[dict[str, Tensor], Any]:
    """A tensor's inner tensors and context, by its class's own `__tensor_flatten__`."""
    names, context = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}, context


def made_by(cls: Any) -> Unflatten:
    """The inverse of `made_of`, by the class's own `__tensor_unflatten__`."""
    return lambda inner, context, shape: cls.__tensor_unflatten__(
        inner, context, shape, contiguous_strides(shape)
    )
