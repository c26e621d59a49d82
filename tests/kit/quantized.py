"""Models whose frozen weights are quantized, with trained adapters beside them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from composer_dist.distributed import register_tensor_codec, steps
from tests.kit.huggingface import llama


class Int8Rows(Tensor):
    """8-bit integers `(rows, columns)` and a scale for each row `(rows,)`: a traceable wrapper subclass."""

    data8: Tensor
    scales: Tensor
    shift: Tensor

    @staticmethod
    def __new__(cls: Any, data8: Tensor, scales: Tensor, shift: Tensor, shape: Any = None) -> Any:
        shape = data8.shape if shape is None else shape
        return Tensor._make_wrapper_subclass(cls, shape, dtype=scales.dtype, device=data8.device)

    def __init__(self, data8: Tensor, scales: Tensor, shift: Tensor, shape: Any = None) -> None:
        self.data8, self.scales, self.shift = data8, scales, shift

    @classmethod
    def of(cls, dense: Tensor) -> Any:
        shift = dense.mean()
        scales = (dense - shift).abs().amax(1) / 127
        return cls(((dense - shift) / scales[:, None]).round().to(torch.int8), scales, shift)

    def dense(self) -> Tensor:
        return self.data8.to(self.scales.dtype) * self.scales[:, None] + self.shift

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data8", "scales", "shift"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: None, shape: Any, stride: Any) -> Any:
        return cls(*inner.values(), shape=shape)

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.data8, self.scales), self.shift

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        return None if out is not None else (type(self)(*outputs, metadata), outputs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            return nn.functional.linear(args[0], args[1].dense(), *args[2:])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func not in (aten.detach.default, aten.view.default, aten.as_strided.default, aten.alias.default):
            raise NotImplementedError(str(func))
        one = args[0]
        shape = [one.numel()] if func is aten.view.default and args[1] == [-1] else one.shape
        return cls(one.data8, one.scales, one.shift, shape)


register_tensor_codec(
    Int8Rows,
    rows=["data8", "scales"],
    to_dense=lambda tensor: tensor.dense(),
    from_dense=lambda dense, like: Int8Rows.of(dense),
)


NF4 = pytest.mark.skipif(find_spec("torchao") is None, reason="NF4 is torchao's; it is an extra")
KINDS = pytest.mark.parametrize("kind", ["int8", pytest.param("nf4", marks=NF4)])
"""For tests on both quantized classes."""


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Of the trained parameters."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def nf4_llama() -> Any:
    """A Llama whose projections are NF4."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 2, "vocab_size": 16}
    model = llama(num_hidden_layers=1, **sizes).eval()
    for layer in model.model.layers.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(quantize(layer.weight.detach(), "nf4"), requires_grad=False)
    return model


def quantize(dense: Tensor, kind: str) -> Any:
    """`dense` as an `Int8Rows`, or as torchao's NF4."""
    if kind == "int8":
        return Int8Rows.of(dense)
    from torchao.quantization import NF4Tensor

    return NF4Tensor.from_tensor(dense, 64, 256)


class Adapted(nn.Module):
    """A quantized, frozen linear layer with a trained low-rank one beside it."""

    def __init__(self, kind: str, rows: int, columns: int) -> None:
        super().__init__()
        base = nn.Linear(columns, rows)
        base.weight = nn.Parameter(quantize(base.weight.detach(), kind), requires_grad=False)
        base.weight.tag = "frozen"
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(columns, 2, bias=False)
        self.up = nn.Linear(2, rows, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Stack(nn.Module):
    """Two adapted layers between an embedding and a head."""

    def __init__(self, kind: str = "int8", width: int = 0) -> None:
        super().__init__()
        width = width or {"int8": 8, "nf4": 256}[kind]
        self.embed = nn.Embedding(16, width)
        self.layers = nn.ModuleList(Adapted(kind, width, width) for _ in range(2))
        self.head = nn.Linear(width, 16, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(x)


class Float8Block(nn.Module):
    """Two linear layers that can compute in float8, and two that cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16, bias=False)
        self.odd = nn.Linear(16, 5)
        self.quantized = nn.modules.linear.NonDynamicallyQuantizableLinear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x))) + self.odd(x).mean(-1, keepdim=True)


class Float8Linear(nn.Linear):
    """Stands for torchao's: rounds its operands to float8, one scale each."""

    def __init__(self, like: nn.Linear) -> None:
        with torch.device("meta"):
            super().__init__(like.in_features, like.out_features, bias=False)
        self.weight, self.bias = like.weight, like.bias
        self.config = "the recipe"

    def forward(self, x: Tensor) -> Tensor:
        assert self.config
        weight = self.weight + (_rounded(self.weight.detach()) - self.weight.detach())
        return nn.functional.linear(_rounded(x.detach()) + (x - x.detach()), weight, self.bias)


def _rounded(x: Tensor) -> Tensor:
    scale = 448 / x.abs().amax().clamp(min=1e-12)
    return (x * scale).to(torch.float8_e4m3fn).to(x.dtype) / scale


@contextmanager
def float8_torchao() -> Iterator[None]:
    """Inside, the machine can compute in float8, by a stand-in for torchao's one function that is used."""
    package, module = ModuleType("torchao"), ModuleType("torchao.float8")
    module.convert_to_float8_training = Float8Linear  # type: ignore[attr-defined]
    modules = {"torchao": package, "torchao.float8": module}
    with mock.patch.dict(sys.modules, modules), mock.patch.object(steps, "require_fp8"):
        yield
