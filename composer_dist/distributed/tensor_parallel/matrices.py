"""Which matrices tensor parallelism can cut, and along which dimension."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from composer_dist.distributed.tensor_parallel.styles import Style
from composer_dist.structure.families import is_a


@dataclass(frozen=True)
class Cut:
    """How one parameter is cut among the tensor-parallel ranks."""

    dim: int
    groups: int = 1
    """The number of equal groups in that dimension, each of which is cut separately."""


def is_matrix(module: nn.Module) -> bool:
    """Whether `module` multiplies by a matrix that can be cut: an unquantized Linear or GPT-2's Conv1D."""
    weight = module._parameters.get("weight")
    if weight is None or not weight.is_floating_point():
        return False
    if isinstance(module, nn.Linear):
        return tuple(weight.shape) == (module.out_features, module.in_features)
    return is_conv1d(module)


_PRODUCTS = {
    "torch.nn.modules.linear",
    "transformers.pytorch_utils",  # Conv1D
    "transformers.models.falcon.modeling_falcon",
    "torchao.float8.float8_linear",
}
"""Modules of other libraries whose matrices have a forward that can be cut."""


def is_known(module: nn.Module) -> bool:
    """Whether the forward of a matrix is a product whose parts, on the ranks, make the whole.

    Other classes derived from Linear may read all of the weight: its mean (BitLinear), its norm (cosine).
    """
    return getattr(type(module).forward, "__module__", None) in _PRODUCTS


def is_conv1d(module: nn.Module) -> bool:
    """Whether `module` is transformers' Conv1D, a linear layer with a weight of `(in, out)`."""
    return is_a(module, "Conv1D")


def base_of(module: nn.Module) -> nn.Module:
    """The layer inside a peft adapter layer, or the module itself."""
    base = module._modules.get("base_layer") if hasattr(module, "adapter_layer_names") else None
    return module if base is None else base


def features(module: nn.Module) -> tuple[int, int]:
    """The numbers of output and input features of a matrix; of columns and rows of an embedding."""
    first, second = module._parameters["weight"].shape  # type: ignore[union-attr]
    return (first, second) if isinstance(module, nn.Linear) else (second, first)


def out_dim(module: nn.Module) -> int:
    """The weight's dimension of output features."""
    return 0 if isinstance(module, nn.Linear) else 1


def cuts_of(module: nn.Module, style: Style) -> Iterator[tuple[str, Cut]]:
    """The key of each parameter that the style cuts, and how it is cut."""
    if style.cut is None:
        return
    along_out = style.cut == "out"
    yield "weight", Cut(out_dim(module) if along_out else 1 - out_dim(module), style.groups)
    if along_out and module._parameters.get("bias") is not None:
        yield "bias", Cut(0, style.groups)
