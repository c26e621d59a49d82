"""float8: the blocks' linear layers multiply matrices in 8 bits, by torchao.

Parameters, communication and everything else are as with `precision="amp_bf16"`. A linear layer remains the
same object, with its parameters and hooks; only its class changes to torchao's.
"""

from composer_dist.distributed.compiling.plan import CompilePlan
from composer_dist.structure.structure import Structure


def apply(structure: Structure, plan: CompilePlan | None) -> None:
    """Make the planned linear layers compute in float8, in place, before any other step."""
    if plan is None or not plan.float8:
        return
    from torchao.float8 import convert_to_float8_training  # an extra, and slow to import

    for name in plan.float8:
        linear = structure.modules[name]
        converted = convert_to_float8_training(linear)  # another module with the same parameters
        vars(linear).update({key: value for key, value in vars(converted).items() if key not in vars(linear)})
        linear.__class__ = type(converted)
