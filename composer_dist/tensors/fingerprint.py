"""A hash of a tensor's values, with which ranks compare their tensors."""

from functools import lru_cache

import torch

from composer_dist.tensors.parts import as_bytes, elements

_STEP = 1 << 20
"""Bytes hashed at a time."""
_MASK = (1 << 64) - 1


@torch.no_grad()
def fingerprint(tensor: torch.Tensor) -> int:
    """A 64-bit hash of a tensor's shape and bytes, equal on all ranks that hold the same values.

    Bytes are read as integers, multiplied by odd pseudo-random weights and summed modulo 2^64
    (multilinear hashing: Carter and Wegman, 1979), a megabyte at a time, on the tensor's own device.
    """
    tensor, total = tensor.detach(), hash(tuple(tensor.shape))
    weights = _weights(tensor.device)
    step = _STEP // tensor.dtype.itemsize
    for start in range(0, tensor.numel(), step):
        part = as_bytes(elements(tensor, start, min(start + step, tensor.numel())))
        words, rest = part[: len(part) // 8 * 8], part[len(part) // 8 * 8 :]
        words = (words.clone() if words.storage_offset() % 8 else words).view(torch.int64)
        for numbers in (words, rest.to(torch.int64)):
            hashed = (numbers * weights[: numbers.numel()]).sum()
            total = (total * 0x5851F42D4C957F2D + int(hashed) + start) & _MASK
    return total & _MASK


@lru_cache(maxsize=2)
def _weights(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(1 << 62, (_STEP // 8,), generator=generator, device="cpu")
    return numbers.mul_(2).add_(1).to(device)
