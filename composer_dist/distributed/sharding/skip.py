"""Allows ranks to skip modules in a step, such as an image tower for a batch without images.

Such a module cannot contain a unit, whose collectives need every rank. Either its parameters stay whole on
each rank ("replicate"), and their gradients are averaged with those of other plain parameters, or they belong
to the unit that contains it ("root"), which always gathers and reduces them.

Backward also needs all ranks, in the same order. FSDP2 reduces only parameters with a gradient, and a rank
that skipped the module has none. If any other rank has used it, that rank connects the unit's outputs to the
skipped parameters, with gradients of zero. FSDP2 reduces a unit when the gradients of its inputs are ready,
or at the end, so whether inputs have gradients must not depend on earlier skips.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composer_dist import _torch
from composer_dist.distributed.sharding.assign_units import Skippable
from composer_dist.distributed.training.average_gradients import exchange, groups_of
from composer_dist.structure.structure import Held, Structure
from composer_dist.tensors.nested import replace_tensors, tensors_in


def let_skip(
    structure: Structure, skippable: Sequence[Skippable], units: Iterable[str], mesh: DeviceMesh
) -> None:
    """Allow the ranks of `mesh` to skip these modules of a sharded model with these units."""
    for name in filter(None, units if skippable else ()):
        structure.modules[name].register_forward_pre_hook(_require_gradient, with_kwargs=True, prepend=True)
    groups = groups_of(mesh)
    for unit in dict.fromkeys(one.unit for one in skippable if one.unit is not None):
        towers = [
            _Tower(structure.modules[one.module], [structure.tensors[name] for name in one.parameters])
            for one in skippable
            if one.unit == unit
        ]
        _Around(structure.modules[unit], towers, groups)


def _require_gradient(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Make the inputs require a gradient, as if no earlier module had been skipped."""
    floating = [t for t in tensors_in([args, kwargs]) if t.is_floating_point()]
    if not torch.is_grad_enabled() or not floating or any(t.requires_grad for t in floating):
        return None
    return replace_tensors(lambda t: t.detach().requires_grad_() if t is floating[0] else t, (args, kwargs))


@dataclass(eq=False)
class _Tower:
    module: nn.Module
    parameters: list[Held]
    ran: bool = False
    """Whether this rank has called it in the current forward of the unit."""

    def __post_init__(self) -> None:
        self.module.register_forward_pre_hook(self._note)

    def _note(self, module: nn.Module, args: Any) -> None:
        self.ran = True


@dataclass(eq=False)
class _Around:
    module: nn.Module
    towers: list[_Tower]
    groups: list[dist.ProcessGroup] = field(repr=False)

    def __post_init__(self) -> None:
        self.module.register_forward_pre_hook(self._begin)
        self.module.register_forward_hook(self._end, prepend=True)

    def _begin(self, module: nn.Module, args: Any) -> None:
        for tower in self.towers:
            tower.ran = False

    def _end(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not torch.is_grad_enabled():
            return output
        ran = exchange(torch.tensor([[int(tower.ran) for tower in self.towers]]), self.groups).amax(0)
        missed = [t for t, some in zip(self.towers, ran.tolist(), strict=True) if some and not t.ran]
        parameters = [held.get() for tower in missed for held in tower.parameters]
        if not parameters:
            return output
        tied = [t for t in tensors_in(output) if t.is_floating_point()]
        tied = [t for t in tied if t.requires_grad] or tied
        chosen, passes = set(map(id, tied)), set[int]()
        return replace_tensors(
            lambda t: _Tied.apply(t, passes, *parameters) if id(t) in chosen else t,  # type: ignore[no-untyped-call]
            output,
        )


class _Tied(torch.autograd.Function):
    """The identity; its backward gives each of the parameters a gradient of zero, once per backward pass."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, passes: set[int], *parameters: torch.Tensor) -> torch.Tensor:
        ctx.passes = passes
        ctx.parameters = [(p.shape, p.dtype, p.device) for p in parameters]
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        number = _torch.current_backward()
        if number in ctx.passes:
            return gradients[0], None, *([None] * len(ctx.parameters))
        ctx.passes.add(number)
        zeros = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.parameters]
        return gradients[0], None, *zeros
