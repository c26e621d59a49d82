"""float8: the matrix products of the blocks' linear layers in 8 bits, by torchao.

Parameters, communication and everything else stay as `precision="amp_bf16"` has them. A linear layer
keeps its identity, its parameters and its hooks; it only becomes one of torchao's.
"""

from composer_dist.distributed.compiling.plan import CompilePlan
from composer_dist.structure.structure import Structure


def apply(structure: Structure, plan: CompilePlan | None) -> None:
    """Let the planned linear layers compute in float8, in place; before anything else is done to them."""
    if plan is None or not plan.float8:
        return
    from torchao.float8 import convert_to_float8_training  # an extra, and slow to import

    for name in plan.float8:
        linear = structure.modules[name]
        converted = convert_to_float8_training(linear)  # another module with the same parameters
        vars(linear).update({key: value for key, value in vars(converted).items() if key not in vars(linear)})
        linear.__class__ = type(converted)
