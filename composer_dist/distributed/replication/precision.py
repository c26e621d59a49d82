"""The precision in which a replicated model computes, and that of its outputs."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.hooks import RemovableHandle

from composer_dist.tensors.nested import replace_tensors


def compute_in(model: nn.Module, device_type: str, policy: MixedPrecisionPolicy) -> list[RemovableHandle]:
    """Run every forward under autocast to a low `param_dtype`, and cast its outputs to `output_dtype`."""
    low, output_dtype = policy.param_dtype, policy.output_dtype
    dtype = low if low in (torch.bfloat16, torch.float16) else None
    if dtype is None and output_dtype is None:
        return []
    contexts: list[AbstractContextManager[Any]] = []  # several if forward calls the model itself

    def enter(model: nn.Module, args: Any) -> None:
        context = torch.autocast(device_type, dtype=dtype) if dtype else nullcontext()
        contexts.append(context)
        context.__enter__()

    def leave(model: nn.Module, args: Any, output: Any) -> Any:
        if contexts:  # none if an earlier hook has raised
            contexts.pop().__exit__(None, None, None)
        if output_dtype is None:
            return None
        return replace_tensors(lambda t: t.to(output_dtype) if t.is_floating_point() else t, output)

    after = torch.compiler.disable(leave)
    return [
        model.register_forward_pre_hook(torch.compiler.disable(enter)),
        model.register_forward_hook(after, always_call=True),
    ]
