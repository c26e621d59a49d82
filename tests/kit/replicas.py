"""Helpers of the tests of DDP in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.config.replicate import DDPConfig


def ddp(**options: Any) -> ParallelismConfig:
    """DDP on every rank; what is no field of `DDPConfig` goes beside it."""
    own = {key: options.pop(key) for key in list(options) if key in DDPConfig.__dataclass_fields__}
    return ParallelismConfig(ddp=DDPConfig(**own), bucket_bytes=512, **options)


def alike(model: nn.Module, part: Callable[[Tensor], Tensor | None] = lambda p: p.detach()) -> bool:
    """Whether all ranks hold the same values."""
    flat = torch.cat([value.flatten().double() for p in model.parameters() if (value := part(p)) is not None])
    everywhere = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, flat)
    return all(torch.equal(one, everywhere[0]) for one in everywhere)


def mine(x: Tensor) -> Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()]


@contextmanager
def fails(kind: type[BaseException], *texts: str) -> Iterator[None]:
    with pytest.raises(kind) as caught:
        yield
    for text in texts:
        assert text in str(caught.value), str(caught.value)


def grads_equal(model: nn.Module, single: nn.Module) -> None:
    expected = dict(single.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, expected[name].grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
