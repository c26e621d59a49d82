"""How much an operator computes, and how fast devices do."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

from composer_dist import _torch
from composer_dist.distributed.feature_plan import Work
from composer_dist.tensors.nested import tensors_in

_ATTENTION: Mapping[Any, Any] = dict(
    zip(_torch.attention_on_cpus(), (sdpa_flop, sdpa_backward_flop), strict=True)
)
"""What runs on CPUs, where a step is traced; torch has formulas for the others."""


def work_of(func: Any, args: Any, kwargs: Any, made: Any) -> Work | None:
    """What an operator computes; None of one that only makes views."""
    if getattr(func, "is_view", False):
        return None
    packet = _torch.packet(func)
    formula = flop_registry.get(packet) or _ATTENTION.get(packet)
    given = list(tensors_in((args, kwargs)))
    outputs = list(tensors_in(made))
    if not outputs:
        return None
    flops = int(formula(*args, **kwargs, out_val=made)) if formula else 0
    unique = {id(one): one for one in (*given, *outputs)}
    dtype = given[0].dtype if given else outputs[0].dtype
    return Work(flops, sum(one.nbytes for one in unique.values()), dtype, recomputed=False)


@dataclass(frozen=True, kw_only=True)
class Device:
    """The rates of one device."""

    flops: Mapping[torch.dtype, float]
    """Dense matrix products per second by dtype; other dtypes have the least of them."""
    bandwidth: float
    """Of its memory, in bytes per second."""

    def seconds(self, work: Work) -> float:
        """The time of an operator: that of its products or of its memory, whichever is longer."""
        rate = self.flops.get(work.dtype, min(self.flops.values()))
        return max(work.flops / rate, work.nbytes / self.bandwidth)


DEVICES: Mapping[str, Device] = {
    "h100": Device(
        flops={torch.bfloat16: 989e12, torch.float16: 989e12, torch.float32: 67e12}, bandwidth=3.35e12
    ),
    "a100": Device(
        flops={torch.bfloat16: 312e12, torch.float16: 312e12, torch.float32: 19.5e12}, bandwidth=2.039e12
    ),
}
"""H100 SXM and A100 SXM with 80 GB, by NVIDIA's data sheets, without sparsity and TF32."""
