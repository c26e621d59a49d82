"""How tensors of a subclass are taken apart into plain tensors, and put together again.

A tensor subclass may keep its value in several *inner* tensors: packed integers, scales, a table. Its
codec says what they are, which of them *follow the rows* (each rank's part of dimension 0 of the whole
goes with its part of dimension 0 of these; the others are whole on every rank), and how the whole is
converted to and from a dense tensor. `inner.py` uses this to allocate, deliver, compare, gather and load
shards inner tensor by inner tensor; FSDP2 gathers them through the class's own `fsdp_pre_all_gather` and
`fsdp_post_all_gather`. `torchao.py` has the codecs of torchao's classes.
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
    """How the tensors of one class are taken apart and put together; see `register_tensor_codec`."""

    rows: frozenset[str]
    to_dense: Callable[[Tensor], Tensor]
    from_dense: Callable[[Tensor, Tensor], Tensor]
    flatten: Flatten
    unflatten: Unflatten


codecs: dict[type[Tensor], TensorCodec] = {}
"""The codecs registered so far."""


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
        cls: the class, exactly; its subclasses need codecs of their own. To be sharded it also has
            FSDP2's `fsdp_pre_all_gather` and `fsdp_post_all_gather`.
        rows: names of the inner tensors that follow the rows: dimension 0 of each, cut in equal parts,
            belongs to dimension 0 of the whole, cut in as many parts.
        to_dense: the value as a plain tensor, of the same shape and dtype.
        from_dense: `(dense, like)`: a tensor of the class with the value of `dense`. `like`, a tensor of
            the class (this rank's part, maybe), has the settings: block sizes and so on.
        flatten: the inner tensors by name, and whatever else the tensor is made of; None uses the
            class's own `__tensor_flatten__`.
        unflatten: the inverse, `(inner, context, shape)`, for the shape of the whole or of a shard;
            None uses the class's own `__tensor_unflatten__`, with a contiguous outer stride.
        replace: replace the codec that the class has.

    Raises:
        ParallelismTypeError: `cls` is not a tensor class, or lacks the two methods that would be used.
        ParallelismValueError: only one of `flatten` and `unflatten`, or there is a codec and no `replace`.
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
        raise ParallelismValueError(f"{cls.__name__} has a codec already; pass replace=True to replace it.")
    codecs[cls] = TensorCodec(
        frozenset(rows), to_dense, from_dense, flatten or made_of, unflatten or made_by(cls)
    )


def made_of(tensor: Any) -> tuple[dict[str, Tensor], Any]:
    """A tensor taken apart by its class's own `__tensor_flatten__`."""
    names, context = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}, context


def made_by(cls: Any) -> Unflatten:
    """The inverse, by the class's own `__tensor_unflatten__`."""
    return lambda inner, context, shape: cls.__tensor_unflatten__(
        inner, context, shape, contiguous_strides(shape)
    )
