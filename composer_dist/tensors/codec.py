"""Tensors that are made of others: a quantized weight taken apart into plain tensors, and put together again.

A tensor subclass may keep its value in several *inner* tensors: packed integers, scales, a table. Its
codec says what they are, which of them *follow the rows* (each rank's part of dimension 0 of the whole
goes with its part of dimension 0 of these; the others are whole on every rank), and how the whole
becomes a dense tensor and is made of one. With that its shards are allocated, delivered, compared,
gathered and loaded inner tensor by inner tensor; FSDP2 gathers it by the class's own
`fsdp_pre_all_gather` and `fsdp_post_all_gather`. torchao's NF4Tensor is known by itself, and so are the
classes in which its optimizers hold their state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from composer_dist import _torch
from composer_dist.errors import ParallelismTypeError, ParallelismValueError

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


@dataclass(frozen=True)
class Inner:
    """An inner tensor as pure data."""

    name: str
    shape: tuple[int, ...]
    """In the whole tensor, not in a shard."""
    dtype: torch.dtype
    rows: bool
    """Whether it follows the rows."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


_codecs: dict[type[Tensor], TensorCodec] = {}


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
    """Let models hold frozen parameters of a tensor subclass. Every rank registers the same.

    Args:
        cls: the class, exactly; its subclasses need codecs of their own. To be sharded it also has
            FSDP2's `fsdp_pre_all_gather` and `fsdp_post_all_gather`.
        rows: names of the inner tensors that follow the rows: dimension 0 of each, cut in equal parts,
            belongs to dimension 0 of the whole, cut in as many.
        to_dense: the value as a plain tensor, of the same shape and dtype.
        from_dense: `(dense, like)`: a tensor of the class with the value of `dense`. `like`, a tensor of
            the class (this rank's part, maybe), has the settings: block sizes and so on.
        flatten: the inner tensors by name, and whatever else the tensor is made of; None uses the
            class's own `__tensor_flatten__`.
        unflatten: the inverse, `(inner, context, shape)`, for the shape of the whole or of a shard;
            None uses the class's own `__tensor_unflatten__`, with a contiguous outer stride.
        replace: the class may have a codec already.

    Raises:
        ParallelismTypeError: `cls` is no tensor class, or lacks the two methods that are to be used.
        ParallelismValueError: only one of `flatten` and `unflatten`, or there is a codec and no `replace`.
    """
    if not (isinstance(cls, type) and issubclass(cls, Tensor)) or cls in (Tensor, nn.Parameter):
        raise ParallelismTypeError(f"A codec is for a subclass of torch.Tensor, not for {cls!r}.")
    if (flatten is None) != (unflatten is None):
        raise ParallelismValueError(f"{cls.__name__}: give both flatten and unflatten, or neither.")
    if flatten is None and not all(hasattr(cls, f"__tensor_{name}__") for name in ("flatten", "unflatten")):
        raise ParallelismTypeError(
            f"{cls.__name__} has no __tensor_flatten__ and __tensor_unflatten__; give flatten and unflatten."
        )
    if cls in _codecs and not replace:
        raise ParallelismValueError(f"{cls.__name__} has a codec already; pass replace=True to replace it.")
    _codecs[cls] = TensorCodec(
        frozenset(rows), to_dense, from_dense, flatten or made_of, unflatten or made_by(cls)
    )


def codec_of(tensor: Tensor) -> TensorCodec | None:
    """The codec of a tensor, or of a DTensor's shards; None for plain tensors and classes without one."""
    cls = type(tensor)
    if cls is Tensor or cls is nn.Parameter:
        return None
    if issubclass(cls, DTensor):
        return codec_of(local_part(tensor))
    if cls not in _codecs and cls.__module__.startswith("torchao."):
        if cls.__name__ == "NF4Tensor":
            _codecs[cls] = _nf4_codec(cls)
        elif cls.__name__ in ("OptimState8bit", "OptimState4bit", "OptimStateFp8"):
            from composer_dist.tensors.torchao import optimizer_state_codec

            _codecs[cls] = optimizer_state_codec(cls)
    return _codecs.get(cls)


def inner_tensors(tensor: Tensor) -> dict[str, Tensor]:
    """What a tensor is made of, sharing its memory: DTensors for a DTensor; {} where it has no codec."""
    codec = codec_of(tensor)
    if codec is None:
        return {}
    found = codec.flatten(local_part(tensor))[0]
    if not isinstance(tensor, DTensor):
        return {name: inner.detach() for name, inner in found.items()}
    whole = [Replicate()] * tensor.device_mesh.ndim
    return {
        name: _torch.as_dtensor(inner.detach(), tensor.device_mesh, tensor.placements, _rows(tensor))
        if name in codec.rows
        else _torch.as_dtensor(inner.detach(), tensor.device_mesh, whole, 1)
        for name, inner in found.items()
    }


def describe_inner(tensor: Tensor) -> tuple[Inner, ...]:
    """What a tensor is made of, as data; () where it has no codec."""
    codec = codec_of(tensor)
    if codec is None:
        return ()
    return tuple(
        Inner(name, tuple(inner.shape), inner.dtype, name in codec.rows)
        for name, inner in inner_tensors(tensor).items()
    )


@torch.no_grad()
def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def rebuild(tensor: Tensor, inner: Mapping[str, Tensor], shape: torch.Size) -> Tensor:
    """A tensor like `tensor` (which has a codec, or whose shards have) made of other inner tensors."""
    codec = _known(tensor)
    return codec.unflatten(inner, codec.flatten(local_part(tensor))[1], shape)


def empty_like(
    tensor: Tensor, device: torch.device | str, parts: int = 1, pin_memory: bool = False
) -> Tensor:
    """A tensor of the same class, uninitialized: all of it, or one of `parts` equal parts of its rows."""
    rows, inner = _known(tensor).rows, {}
    for name, value in inner_tensors(tensor).items():
        size = _part(value.shape, parts) if name in rows else value.shape
        inner[name] = torch.empty(size, dtype=value.dtype, device=device, pin_memory=pin_memory)
    return rebuild(tensor, inner, _part(tensor.shape, parts))


def dense(tensor: Tensor) -> Tensor:
    """The value of a tensor as a plain one; the tensor itself where it has no codec."""
    codec = codec_of(tensor)
    return tensor.detach() if codec is None else codec.to_dense(tensor.detach())


def encoded(full: Tensor, like: Tensor) -> Tensor:
    """A full tensor, dense or not, in the class and with the settings of `like`.

    Args:
        full: the value, on any device; as it is where `like` has no codec.
        like: a tensor of the model: full, or sharded.

    Raises:
        ParallelismValueError: `from_dense` gives other inner tensors than `like` is made of.
    """
    codec = codec_of(like)
    if codec is None:
        return full
    wanted, local = describe_inner(like), local_part(like)
    if describe_inner(full) != wanted or type(full) is not type(local):
        device = full.device if local.device.type in {"meta", "cpu"} else local.device
        full = codec.from_dense(dense(full).to(device, like.dtype), local)
        if (got := describe_inner(full)) != wanted:
            raise ParallelismValueError(
                f"The codec's from_dense makes a {type(full).__name__} of {list(got)}, where the model has "
                f"a {type(local).__name__} of {list(wanted)}."
            )
    return full


@torch.no_grad()
def encode_into(tensor: Tensor, value: Tensor) -> None:
    """Give a tensor the value of a plain one, in place; by its codec, where it has one."""
    if codec_of(tensor) is None:
        tensor.copy_(value)
        return
    made = _known(tensor).from_dense(value, tensor)
    for mine, new in zip(inner_tensors(tensor).values(), inner_tensors(made).values(), strict=True):
        mine.copy_(new)


def parts(name: str, tensor: Tensor, full: Tensor | None) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """What has to be filled to fill a tensor, each part by name, with its full value where there is one.

    Args:
        tensor: of the model; itself the only part, unless it has a codec.
        full: its value, of the same class.
    """
    inner = inner_tensors(tensor)
    if not inner:
        yield name, tensor, full
    values = {} if full is None else inner_tensors(full)
    for key, part in inner.items():
        yield f"{name}.{key}", part, values.get(key)


def own_attributes(tensor: Tensor) -> dict[str, Any]:
    """The Python attributes that somebody has put on a tensor, without those that its class is made of."""
    attributes = dict(vars(tensor))
    if attributes and not isinstance(tensor, DTensor) and codec_of(tensor) is not None:
        made = vars(rebuild(tensor, inner_tensors(tensor), tensor.shape))
        attributes = {name: value for name, value in attributes.items() if name not in made}
    return attributes


def _rows(tensor: DTensor) -> int:
    """Into how many parts a DTensor's rows are cut."""
    rows = local_part(tensor).shape[0]
    return tensor.shape[0] // rows if rows else 1


def _part(shape: torch.Size, parts: int) -> torch.Size:
    return torch.Size((shape[0] // parts, *shape[1:]))


def _known(tensor: Tensor) -> TensorCodec:
    codec = codec_of(tensor)
    assert codec is not None
    return codec


def made_of(tensor: Any) -> tuple[dict[str, Tensor], Any]:
    """A tensor taken apart by its class's own `__tensor_flatten__`."""
    names, context = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}, context


def made_by(cls: Any) -> Unflatten:
    """The inverse, by the class's own `__tensor_unflatten__`."""
    return lambda inner, context, shape: cls.__tensor_unflatten__(inner, context, shape, _strides(shape))


def _strides(shape: torch.Size) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    return torch.empty(shape, device="meta").stride()


def _nf4_codec(cls: Any) -> TensorCodec:
    """NF4: 4-bit integers in blocks, whose scales are 8-bit integers in blocks of blocks (QLoRA).

    torchao moved the class between versions (torchao/dtypes/nf4tensor.py, then
    torchao/quantization/quantize_/workflows/nf4/nf4_tensor.py), so it is known by the tensor at hand. Its
    own `__tensor_unflatten__` makes the shape that was flattened, whatever it is asked for.
    """

    def unflatten(inner: Mapping[str, Tensor], context: Any, shape: torch.Size) -> Tensor:
        meta = dataclasses.replace(
            context["tensor_meta"],
            original_shape=shape,
            original_strides=_strides(shape),
            storage_offset=0,
            device=inner["quantized_data"].device,
            requires_grad=False,
        )
        made: Tensor = cls.__tensor_unflatten__(dict(inner), context | {"tensor_meta": meta}, None, None)
        return made

    def from_dense(tensor: Tensor, like: Any) -> Tensor:
        made: Tensor = cls.from_tensor(tensor.contiguous(), like.block_size, like.scaler_block_size)
        return made

    return TensorCodec(
        rows=frozenset({"quantized_data", "quantized_scalers", "quantization_factor"}),
        to_dense=lambda tensor: tensor.get_original_weight(),  # type: ignore[attr-defined]
        from_dense=from_dense,
        flatten=made_of,
        unflatten=unflatten,
    )
