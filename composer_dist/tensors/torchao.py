"""State of torchao's optimizers: 8- or 4-bit codes in blocks, each with a scale, of one rank's part alone.

A code stands for an entry of a table, times its block's scale. torchao finds the scale as the largest
magnitude, though its signed tables do not reach from -1 to 1; so what it has made of floats, given as
floats again, would shrink. Here the scale is found by the table, and such floats give the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from composer_dist.tensors.codec import TensorCodec, dense, local_part, made_by, made_of


def optimizer_state_codec(cls: Any) -> TensorCodec:
    """The codec of one of torchao's classes, for parts that each rank has made by itself."""

    def from_dense(dense: Tensor, like: Any) -> Tensor:
        inner, context = made_of(like)
        made: Tensor = made_by(cls)(
            {name: value.clone() for name, value in inner.items()}, context, like.shape
        )
        if "qmap" not in inner:  # float8: no table, and no loss
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

    return TensorCodec(
        rows=frozenset(),
        to_dense=lambda tensor: tensor.dequantize(),
        from_dense=from_dense,
        flatten=made_of,
        unflatten=made_by(cls),
    )


def as_floats(tensor: Tensor) -> Tensor:
    """State of such an optimizer in float32, cut as it is; some ranks' parts may be quantized, others not."""
    if not tensor.is_floating_point():
        return tensor
    local = dense(local_part(tensor)).float()
    if not isinstance(tensor, DTensor):
        return local
    return DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def quantize(blocks: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest codes, and the scales, of `(blocks, elements)` by a sorted table.

    Returns:
        Codes, uint8, of the same shape, and scales `(blocks,)`: such that a block that is a table's
        entries times one scale already comes out as it is.
    """
    scale = blocks.amax(1) / table[-1]
    if table[0] < 0:
        scale = torch.maximum(scale, blocks.amin(1) / table[0])
    scaled = blocks / scale.clamp(min=1e-12)[:, None]
    codes = torch.bucketize(scaled, (table[1:] + table[:-1]) / 2)
    entries, best = table[codes], torch.full_like(scale, torch.inf)
    nearest = scale.clone()
    for one in (scale, *(torch.nextafter(scale, torch.full_like(scale, to)) for to in (0.0, torch.inf))):
        wrong = (entries * one[:, None] != blocks).sum(1).to(best)  # dividing may be off by the last bit
        nearest, best = torch.where(wrong < best, one, nearest), torch.minimum(wrong, best)
    return codes.to(torch.uint8), nearest
