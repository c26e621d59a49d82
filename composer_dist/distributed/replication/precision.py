"""The precision in which a replicated model computes, and that of its outputs."""

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.hooks import RemovableHandle

from composer_dist.distributed import forwards
from composer_dist.distributed.forwards import Forward, Layer
from composer_dist.tensors.nested import replace_tensors


def compute_in(model: nn.Module, device_type: str, policy: MixedPrecisionPolicy) -> list[RemovableHandle]:
    """Run every forward under autocast to a low `param_dtype`, and cast its outputs to `output_dtype`."""
    low, output_dtype = policy.param_dtype, policy.output_dtype
    if low in (torch.bfloat16, torch.float16):
        forwards.add(model, Layer.AUTOCAST, functools.partial(_under_autocast, device_type, low))
    if output_dtype is None:
        return []

    def cast(model: nn.Module, args: Any, output: Any) -> Any:
        return replace_tensors(lambda t: t.to(output_dtype) if t.is_floating_point() else t, output)

    return [model.register_forward_hook(torch.compiler.disable(cast))]


def compute_as_before(model: nn.Module) -> None:
    """Take away the autocast of `compute_in`."""
    if forwards.has(model, Layer.AUTOCAST):
        forwards.remove(model, Layer.AUTOCAST)


def _under_autocast(device_type: str, dtype: torch.dtype, module: nn.Module, forward: Forward) -> Forward:
    return functools.update_wrapper(functools.partial(_call, device_type, dtype, forward), forward)


def _call(device_type: str, dtype: torch.dtype, forward: Forward, *args: Any, **kwargs: Any) -> Any:
    # Not by hooks: torch runs none after a KeyboardInterrupt, and autocast would stay on in the process.
    with torch.autocast(device_type, dtype=dtype):
        return forward(*args, **kwargs)
