"""The matrices that tensor parallelism can cut, and along which dimension."""

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
    """Equal groups in that dimension, each of which is cut."""


def is_matrix(module: nn.Module) -> bool:
    """Whether it multiplies by a matrix that can be cut: a Linear, or GPT-2's Conv1D, in full precision."""
    weight = module._parameters.get("weight")
    if weight is None or not weight.is_floating_point():
        return False
    if isinstance(module, nn.Linear):
        return tuple(weight.shape) == (module.out_features, module.in_features)
    return is_conv1d(module)


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is transformers' Conv1D: a Linear whose matrix is `(in, out)`."""
    return is_a(module, "Conv1D")


def base_of(module: nn.Module) -> nn.Module:
    """The layer that peft adapters are added to, or the module itself."""
    base = module._modules.get("base_layer") if hasattr(module, "adapter_layer_names") else None
    return module if base is None else base


def features(module: nn.Module) -> tuple[int, int]:
    """Output and input features of a matrix; columns and rows of an embedding."""
    first, second = module._parameters["weight"].shape  # type: ignore[union-attr]
    return (first, second) if isinstance(module, nn.Linear) else (second, first)


def out_dim(module: nn.Module) -> int:
    """The dimension of the matrix that holds the output features."""
    return 0 if isinstance(module, nn.Linear) else 1


def cuts_of(module: nn.Module, style: Style) -> Iterator[tuple[str, Cut]]:
    """Each parameter of the module that the style cuts, by its key there, and how."""
    if style.cut is None:
        return
    along_out = style.cut == "out"
    yield "weight", Cut(out_dim(module) if along_out else 1 - out_dim(module), style.groups)
    if along_out and module._parameters.get("bias") is not None:
        yield "bias", Cut(0, style.groups)
