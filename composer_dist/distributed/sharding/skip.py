"""Allows ranks to skip modules in a step, such as an image tower for a batch without images.

Such a module cannot contain a unit, whose collectives need every rank. Either its parameters stay whole on
each rank ("replicate"), and their gradients are averaged with those of other plain parameters, or they belong
to the unit that contains it ("root"), which always gathers and reduces them.

Backward also needs all ranks, in the same order. FSDP2 reduces only parameters with a gradient, and a rank
that skipped the module has none. Before it reduces the unit, the ranks tell each other which of the module's
parameters have one, and fill in zeros; a parameter that no rank has used keeps none, as in one process. FSDP2
reduces a unit when the gradients of its inputs are ready, or at the end, so whether inputs have gradients
must not depend on earlier skips.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composer_dist import _torch
from composer_dist.distributed.sharding.assign_units import Skippable
from composer_dist.distributed.training.average_gradients import anywhere, groups_of
from composer_dist.structure.structure import Structure
from composer_dist.tensors.nested import replace_tensors, tensors_in


def let_skip(
    structure: Structure, skippable: Sequence[Skippable], units: Iterable[str], mesh: DeviceMesh
) -> None:
    """Allow the ranks of `mesh` to skip these modules of a sharded model with these units."""
    for name in filter(None, units if skippable else ()):
        structure.modules[name].register_forward_pre_hook(_require_gradient, with_kwargs=True, prepend=True)
    groups = groups_of(mesh)
    for unit in dict.fromkeys(one.unit for one in skippable if one.unit is not None):
        names = [name for one in skippable if one.unit == unit for name in one.parameters]
        shards = [structure.tensors[name].get() for name in names]
        _torch.fill_gradients(structure.modules[unit], shards, partial(anywhere, groups=groups))


def _require_gradient(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Make the inputs require a gradient, as if no earlier module had been skipped."""
    floating = [t for t in tensors_in([args, kwargs]) if t.is_floating_point()]
    if not torch.is_grad_enabled() or not floating or any(t.requires_grad for t in floating):
        return None
    return replace_tensors(lambda t: t.detach().requires_grad_() if t is floating[0] else t, (args, kwargs))
