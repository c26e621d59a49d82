"""Frozen weights in 4 bits below an adapter: QLoRA (arXiv:2305.14314), by torchao's NF4."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from composer_dist.errors import ParallelismRuntimeError, ParallelismValueError
from composer_dist.structure.families import quiet_imports
from composer_dist.structure.names import child_name
from composer_dist.users_code import warn
from composer_dist.wording import listed

_BLOCK, _SCALES = 64, 256
"""Elements in a block, and blocks in a scaler block; the paper's."""


def quantize(model: nn.Module) -> None:
    """Makes the weights of the blocks' linear layers NF4 and frozen, in place, on meta too.

    The head stays as it is: it is often tied to the embedding, and costs little. So do, with a
    warning, layers whose weights another module computes with, as Mamba's mixers do: that has no NF4.

    Raises:
        ParallelismRuntimeError: torchao is not installed.
        ParallelismValueError: the size of some layer does not suit NF4, or its forward is its own; names it.
    """
    nf4 = _nf4()
    untouched: Any = getattr(model, "get_output_embeddings", lambda: None)()
    linears = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and layer is not untouched
    }
    kept = [name for name in _used_by_others(model) if linears.pop(name, None) is not None]
    if kept:
        warn(
            f"NF4 leaves {listed(kept, 3)} as they are: the module that they are in computes with their "
            "weights itself."
        )
    if own := [name for name, layer in linears.items() if type(layer).forward is not nn.Linear.forward]:
        raise ParallelismValueError(
            f"NF4 needs layers with the forward of nn.Linear; {len(own)} have their own, such as {own[0]}, a "
            f"{type(linears[own[0]]).__name__}. Use LoRA without quantize: nf4."
        )
    multiple = _BLOCK * _SCALES
    if odd := [name for name, layer in linears.items() if layer.weight.numel() % multiple]:
        raise ParallelismValueError(
            f"NF4 needs weights with a multiple of {multiple} elements; {len(odd)} have another number, such "
            f"as {odd[0]} of {tuple(linears[odd[0]].weight.shape)}."
        )
    zeros: dict[Any, Any] = {}
    for layer in linears.values():
        weight = layer.weight.detach()
        if weight.is_meta:  # only the structure counts, which is the same for all of one shape
            like = weight.shape, weight.dtype
            if like not in zeros:
                zeros[like] = nf4.from_tensor(torch.zeros(like[0], dtype=like[1]), _BLOCK, _SCALES)
            small = zeros[like].to("meta")
        else:
            small = nf4.from_tensor(weight, _BLOCK, _SCALES)
        layer.weight = nn.Parameter(small, requires_grad=False)


def _used_by_others(model: nn.Module) -> Iterator[str]:
    """The layers of which the code of their parent uses the weight, and not only its dtype, say."""
    codes: dict[type, str] = {}
    for above, module in model.named_modules():
        if type(module) not in codes:
            codes[type(module)] = _code(type(module))
        for key, _ in module.named_children():
            used = rf"self\.{key}\.weight\b(?!\.(?:dtype|device|shape)\b)(?!, torch\.Tensor\))"
            if re.search(used, codes[type(module)]):
                yield child_name(above, key)


def _code(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # typed at a prompt
        return ""


def _nf4() -> Any:
    try:
        with quiet_imports():
            from torchao.quantization import NF4Tensor
    except ImportError:
        raise ParallelismRuntimeError(
            "quantize: nf4 needs torchao: pip install 'composer_dist[torchao]'."
        ) from None
    return NF4Tensor
