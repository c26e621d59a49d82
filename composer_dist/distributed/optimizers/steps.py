"""Steps of optimizers that would do nothing, or half of what they should, in silence."""

from collections.abc import Mapping
from functools import partial
from typing import Any
from weakref import finalize, ref

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from composer_dist import _torch
from composer_dist.distributed.prepared import before_every_step
from composer_dist.errors import Faults, ParallelismRuntimeError
from composer_dist.structure.structure import Structure
from composer_dist.wording import listed


def watch_steps(model: nn.Module, replaced: Mapping[str, Tensor]) -> None:
    """Look at every step of every optimizer of this process while `model` exists.

    Args:
        model: prepared.
        replaced: the parameters, by name, that the model had before.
    """
    former = {id(parameter): (name, ref(parameter)) for name, parameter in replaced.items()}
    before_every_step(model, partial(_before_step, former))
    _former.append(former)
    finalize(model, _former.remove, former)


_former: list[Mapping[int, tuple[str, Any]]] = []
"""The parameters that each prepared model had before, by identity."""


def check_former(structure: Structure) -> None:
    """Raise a ParallelismValueError for parameters shared with a model that was prepared before."""
    with Faults() as faults:
        for name, held in structure.parameters.items():
            for former in _former:
                there, one = former.get(id(held.get()), ("", None))
                if one is not None and one() is held.get():
                    faults.append(
                        f"{name} was also {there} of a model that is prepared, and is replaced there, so the "
                        "two would no longer be one. Prepare both models as parts of one module."
                    )


def _before_step(former: Mapping[int, tuple[str, Any]], model: nn.Module, optimizer: Optimizer) -> None:
    held = {id(one): one for group in optimizer.param_groups for one in group["params"]}
    found = [(name, held[key]) for key, (name, one) in former.items() if key in held and one() is held[key]]
    if old := [name for name, one in found if one.grad is None]:
        raise ParallelismRuntimeError(
            f"{type(optimizer).__name__} holds {listed(old)} from before the preparation, which the model no "
            "longer has, so it would update nothing. Pass it as optimizer=, or build it from "
            "model.parameters() after the preparation."
        )
    units = [one for one in model.modules() if isinstance(one, FSDPModule)]
    if waiting := [name for unit in units for name, one in _torch.unreduced(unit) if id(one) in held]:
        raise ParallelismRuntimeError(
            f"The optimizer would step without the gradients of {listed(waiting)}: they are not reduced over "
            "the ranks yet, because the last backward was inside of no_sync. Run the last one outside of it."
        )
