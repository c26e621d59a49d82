"""Codecs for torchao's classes: quantized weights, and the 8-bit, 4-bit and float8 state of its optimizers.

Optimizer state, which covers one rank's part only, consists of codes in blocks, each block with a scale. A
code represents an entry of a table times its block's scale. torchao's scale is the largest magnitude, but its
signed tables do not reach from -1 to 1, so quantizing dequantized values again would shrink them. Here the
scale depends on the table, and such values give the same bits.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from composer_dist.errors import ParallelismTypeError
from composer_dist.tensors.codec import TensorCodec, made_by, made_of
from composer_dist.tensors.parts import contiguous_strides


def torchao_codec(cls: type[Tensor]) -> TensorCodec | None:
    """The codec of a torchao class; None for any other class."""
    if not cls.__module__.startswith("torchao."):
        return None
    if cls.__name__ == "NF4Tensor":
        return _nf4_codec(cls)
    if cls.__name__ in ("OptimState8bit", "OptimState4bit", "OptimStateFp8"):
        return _optimizer_state_codec(cls)
    is_weight = hasattr(cls, "__tensor_flatten__") and cls.dequantize is not Tensor.dequantize
    return _weight_codec(cls) if is_weight else None


def _nf4_codec(cls: Any) -> TensorCodec:
    """NF4: 4-bit integers in blocks, whose scales are 8-bit integers in blocks of blocks (QLoRA).

    torchao moved the class between versions (torchao/dtypes/nf4tensor.py, then
    torchao/quantization/quantize_/workflows/nf4/nf4_tensor.py), so it is not imported here. Its own
    `__tensor_unflatten__` ignores the requested shape and restores the flattened one.
    """

    def unflatten(inner: Mapping[str, Tensor], context: Any, shape: torch.Size) -> Tensor:
        meta = dataclasses.replace(
            context["tensor_meta"],
            original_shape=shape,
            original_strides=contiguous_strides(shape),
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


def _weight_codec(cls: Any) -> TensorCodec:
    """Weights of any other format, such as int8, which are not cut into shards."""

    def from_dense(dense: Tensor, like: Any) -> Tensor:
        raise ParallelismTypeError(
            f"A {cls.__name__} cannot be made from plain values. Load the weights first, then quantize the "
            "model."
        )

    return _uncut_codec(cls, from_dense)


def _optimizer_state_codec(cls: Any) -> TensorCodec:
    def from_dense(dense: Tensor, like: Any) -> Tensor:
        inner, context = made_of(like)
        copies = {name: value.clone() for name, value in inner.items()}
        made: Tensor = made_by(cls)(copies, context, like.shape)
        if "qmap" not in inner:  # float8 needs no table
            return made.copy_(dense)
        new = made_of(made)[0]
        blocks = dense.to(new["scale"]).reshape(len(new["scale"]), -1)
        codes, scale = quantize(blocks, new["qmap"])
        if len(new["qmap"]) == 16:
            pairs = codes.view(-1, 2)
            codes = (pairs[:, 0] << 4) | pairs[:, 1]
        new["codes"].copy_(codes.view(new["codes"].shape))
        new["scale"].copy_(scale)
        return made

    return _uncut_codec(cls, from_dense)


def _uncut_codec(cls: Any, from_dense: Callable[[Tensor, Any], Tensor]) -> TensorCodec:
    return TensorCodec(
        rows=frozenset(),
        to_dense=lambda tensor: tensor.dequantize(),
        from_dense=from_dense,
        flatten=made_of,
        unflatten=made_by(cls),
    )


def quantize(blocks: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest codes, and the scales, of `(blocks, elements)` by a sorted table.

    Returns:
        Codes, uint8, of the same shape, and scales `(blocks,)`. A block that consists of the table's entries
        times one scale keeps its value.
    """
    scale = blocks.amax(1) / table[-1]
    if table[0] < 0:
        scale = torch.maximum(scale, blocks.amin(1) / table[0])
    scaled = blocks / scale.clamp(min=1e-12)[:, None]
    codes = torch.bucketize(scaled, (table[1:] + table[:-1]) / 2)
    entries, best = table[codes], torch.full_like(scale, torch.inf)
    nearest = scale.clone()
    for one in (scale, *(torch.nextafter(scale, torch.full_like(scale, to)) for to in (0.0, torch.inf))):
        wrong = (entries * one[:, None] != blocks).sum(1).to(best)  # division may be off by one bit
        nearest, best = torch.where(wrong < best, one, nearest), torch.minimum(wrong, best)
    return codes.to(torch.uint8), nearest
