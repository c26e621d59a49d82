"""float8: the matrix products of the blocks' linear layers in 8 bits, by torchao.

Parameters, communication and everything else stay as `precision="amp_bf16"` has them. A linear layer
keeps its identity, its parameters and its hooks; it only becomes one of torchao's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from composer_dist.errors import ParallelismValueError
from composer_dist.precision import Precision, as_precision
from composer_dist.structure.names import ancestors
from composer_dist.structure.structure import Structure

_MULTIPLE = 16
"""What scaled matrix products want of both dimensions of a weight (torch._scaled_mm)."""


def float8_layers(
    structure: Structure, blocks: Sequence[str], precision: str | Precision | None
) -> tuple[str, ...]:
    """The linear layers that compute in float8: those in the blocks whose sizes allow it.

    What lies outside, embeddings and heads, is left alone, as the recipes for float8 training have it.

    Raises:
        ParallelismValueError: float8 is asked for, but finds no layer.
    """
    if as_precision(precision) is not Precision.AMP_FP8:
        return ()
    names = tuple(
        name
        for name, module in structure.modules.items()
        if structure.first[name] == name and _fits(module) and not set(blocks).isdisjoint(ancestors(name))
    )
    if not names:
        raise ParallelismValueError(
            "precision='amp_fp8' finds no layer to compute in float8: it takes each nn.Linear in the "
            f"model's blocks whose sizes are multiples of {_MULTIPLE}. Use 'amp_bf16'."
        )
    return names


def _fits(module: nn.Module) -> bool:
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False  # a subclass's forward, or one of its own, would be lost
    return module.in_features % _MULTIPLE == 0 and module.out_features % _MULTIPLE == 0


def convert_linears(modules: Mapping[str, nn.Module], names: Sequence[str]) -> None:
    """Let the named linear layers compute in float8, in place; before anything else is done to them."""
    from torchao.float8 import convert_to_float8_training  # an extra, and slow to import

    for name in names:
        linear = modules[name]
        converted = convert_to_float8_training(linear)  # another module with the same parameters
        vars(linear).update({key: value for key, value in vars(converted).items() if key not in vars(linear)})
        linear.__class__ = type(converted)
