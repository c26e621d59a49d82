"""Random values in place of parameters whose elements are equal.

A gate or a projection that is initialized to zero would hide what it multiplies from a check of forwards.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from composer_dist import _torch
from composer_dist.distributed import prepared
from composer_dist.tensors.inner import local_part

_FLOATS = torch.float16, torch.bfloat16, torch.float32, torch.float64


@contextmanager
def without_constants(model: nn.Module) -> Iterator[None]:
    """Inside, parameters whose elements are equal on this rank have random values, on all ranks the same.

    Forwards inside run without gradients. None of the values stays, in FSDP2's gathered parameters (even if a
    forward raises) or among autocast's casts.
    """
    prepared.reshard(model)
    kept: list[tuple[Tensor, Tensor]] = []
    number = 0
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # its casts of random values would stay
    try:
        for module in model.modules():
            for name, parameter in module._parameters.items():
                number += 1
                tensor = None if parameter is None else local_part(parameter.detach())
                if tensor is not None and _is_constant(tensor):
                    kept.append((tensor, tensor.clone()))
                    multiplies = name == "weight" and not isinstance(module, nn.Embedding)
                    _write(tensor, _random(tensor, number, multiplies))
        yield
    except BaseException:
        _torch.forget_forward(model)
        raise
    finally:
        torch.set_autocast_cache_enabled(cached)
        prepared.reshard(model)
        for tensor, value in kept:
            _write(tensor, value)


def _is_constant(tensor: Tensor) -> bool:
    if type(tensor) is not Tensor or tensor.dtype not in _FLOATS or not tensor.numel():
        return False
    least, most = tensor.aminmax()
    return bool(least == most)


def _random(tensor: Tensor, seed: int, multiplies: bool) -> Tensor:
    """Between 0.5 and 1.5, which suits scales; of matrices, normal, as they are usually initialized."""
    generator = torch.Generator(tensor.device).manual_seed(seed)
    if tensor.ndim < 2:
        return torch.empty_like(tensor).uniform_(0.5, 1.5, generator=generator).copysign_(tensor)
    deviation = tensor[0].numel() ** -0.5 if multiplies else 1.0
    return torch.empty_like(tensor).normal_(0.0, deviation, generator=generator)


def _write(tensor: Tensor, value: Tensor) -> None:
    with torch.no_grad(), _torch.preserve_version(tensor):
        tensor.copy_(value)
