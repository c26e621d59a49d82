"""The optimizer follows its parameters, state included.

Sharding makes new parameter objects. An optimizer that was made before holds the old ones: stepping
it would move tensors that no module has any more. So its groups are rewritten in place (the group
dictionaries and their lists stay the same objects, for schedulers hold them), and its state is sharded
as its parameter is: a tensor of the parameter's shape row by row, one that is the parameter's shape
with some dimensions reduced to 1 (Adafactor's) by its remaining dimensions, scalars as they are.
Pending gradients go the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from composer_dist import _torch
from composer_dist.distributed.mesh.dimensions import roles
from composer_dist.distributed.mesh.layout import Layout
from composer_dist.distributed.mesh.mesh import Mesh
from composer_dist.distributed.moving.messages import Cargo
from composer_dist.structure.structure import Structure
from composer_dist.tensors.inner import local_part, own_attributes
from composer_dist.wording import dtype_name

Description = dict[str, Any]
"""State in plain types: optimizer index and parameter name to key to what is held there."""


_GRADIENTS = "gradients"
"""The entry of pending gradients in a description; those of states have a slash."""


def describe_groups(optimizers: Sequence[Optimizer], structure: Structure) -> list[list[str]]:
    """What must be alike on all ranks: classes, parameters of each group, plain hyperparameters."""
    names = names_by_id(structure)
    facts: list[list[str]] = []
    for index, optimizer in enumerate(optimizers):
        facts.append([f"optimizer {index}", type(optimizer).__name__])
        for number, group in enumerate(optimizer.param_groups):
            label = f"optimizer {index} group {number}"
            for key in sorted(group):
                if isinstance(group[key], (bool, int, float, str, tuple, type(None))):
                    facts.append([f"{label} {key}", repr(group[key])])
            facts += [[f"{label} {names[id(p)]}", str(place)] for place, p in enumerate(group["params"])]
    return facts


def describe_states(optimizers: Sequence[Optimizer], structure: Structure) -> Description:
    """What state, and which pending gradients, this rank has, in plain types."""
    names = names_by_id(structure)
    found: Description = {}
    for index, optimizer in enumerate(optimizers):
        for parameter, state in optimizer.state.items():
            entry = {key: _describe(value) for key, value in state.items()}
            found[f"{index}/{names[id(parameter)]}"] = entry
    gradients = {
        name: _describe(held.get().grad)
        for name, held in structure.parameters.items()
        if held.get().grad is not None
    }
    return found | ({_GRADIENTS: gradients} if gradients else {})


def state_tensors(optimizers: Sequence[Optimizer], structure: Structure) -> dict[str, torch.Tensor]:
    """The real tensors of states and pending gradients, by what to call them in an error."""
    names = names_by_id(structure)
    found = {
        f"optimizer {index}'s {key} of {names[id(parameter)]}": value
        for index, optimizer in enumerate(optimizers)
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }
    for name, held in structure.parameters.items():
        if (gradient := held.get().grad) is not None:
            found[f"the gradient of {name}"] = gradient
    return {label: value for label, value in found.items() if not value.is_meta}


class Follower:
    """Moves optimizers, their state and pending gradients from old parameters to new ones.

    Args:
        optimizers: as the caller made them.
        structure: the model before it is sharded.
        description: the state to build, this rank's own or the first rank's.
        here: whether this rank has the tensors of the state, full.
        init: parameters on the meta device everywhere, whose state is made anew.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        structure: Structure,
        description: Description,
        here: bool,
        init: frozenset[str],
    ) -> None:
        self._optimizers = optimizers
        self._description = description
        self._here = here
        self._init = init
        self._old = {name: held.get() for name, held in structure.parameters.items()}
        self._names = names_by_id(structure)
        self._groups = {
            f"{index}/{self._names[id(parameter)]}": group
            for index, optimizer in enumerate(optimizers)
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        self._states: dict[str, dict[str, Any]] = {}

    def cargoes(self, new: Mapping[str, nn.Parameter]) -> list[Cargo]:
        """Build the state for the new parameters; the cargoes are its tensors that need values."""
        cargoes: list[Cargo] = []
        for entry, keys in self._description.items():
            state = self._states.setdefault(entry, {})
            for key, what in keys.items():
                if entry == _GRADIENTS:
                    group, name, source = {}, key, self._old[key].grad
                else:
                    index, _, name = entry.partition("/")
                    group = self._groups[entry]
                    source = self._optimizers[int(index)].state.get(self._old[name], {}).get(key)
                source = source if self._here else None
                if what[0] == "value":
                    state[key] = what[1]
                elif what[0] == "scalar":
                    state[key] = _scalar(key, what, source, new[name], group)
                else:
                    label = f"{entry}/{key}"
                    state[key], cargo = self._allocate(label, new[name], tuple(what[1]), what[2])
                    if name in self._init:
                        cargo.target.fill_(group["initial_accumulator_value"])
                    else:
                        cargo.source = source
                        cargoes.append(cargo)
        return cargoes

    def rebind(self, new: Mapping[str, nn.Parameter]) -> None:
        """Let every optimizer hold the new parameters and their state."""
        for index, optimizer in enumerate(self._optimizers):
            for group in optimizer.param_groups:
                group["params"][:] = [new.get(self._names[id(p)], p) for p in group["params"]]
            optimizer.state.clear()
            for entry, state in self._states.items():
                owner, _, name = entry.partition("/")
                if owner == str(index):
                    optimizer.state[new[name]] = state
        for name, gradient in self._states.get(_GRADIENTS, {}).items():
            new[name].grad = gradient

    def _allocate(
        self, label: str, parameter: nn.Parameter, shape: tuple[int, ...], dtype: str
    ) -> tuple[torch.Tensor, Cargo]:
        """Uninitialized state laid out like its parameter, and the cargo that will fill it."""
        value = empty_state(parameter, shape, getattr(torch, dtype))
        return value, Cargo(label, Layout.of(value), value.dtype, local_part(value))


def empty_state(parameter: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Uninitialized state of a parameter, cut as it is, where it has the parameter's dimensions.

    Args:
        shape: of the full state, of as many dimensions as the parameter.
    """
    if not isinstance(parameter, DTensor):
        return torch.empty(shape, dtype=dtype, device=parameter.device)
    mesh, here = parameter.device_mesh, local_part(parameter)
    placements, local = parameter.placements, tuple(here.shape)
    if shape != tuple(parameter.shape):
        layout, tp = Layout.of(parameter).like(shape), roles(mesh).get("tp")
        keeps = [layout.tp_dim is not None if index == tp else layout.rows for index in range(mesh.ndim)]
        placements = tuple(p if keep else Replicate() for p, keep in zip(placements, keeps, strict=True))
        local = layout.local_shape(Mesh.of(parameter).here)
    return DTensor.from_local(
        torch.empty(local, dtype=dtype, device=here.device),
        mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )


def carry_attributes(old: torch.Tensor, new: nn.Parameter) -> None:
    """Give a new parameter the Python attributes and the gradient hooks of the old one."""
    new.__dict__.update(own_attributes(old))
    for hook in _torch.gradient_hooks(old):
        new.register_hook(hook)
    for hook in _torch.accumulated_gradient_hooks(old):
        new.register_post_accumulate_grad_hook(hook)


def names_by_id(structure: Structure) -> dict[int, str]:
    """Every parameter's first name, by the object's identity."""
    return {id(held.get()): name for name, held in structure.parameters.items()}


def _describe(value: Any) -> list[Any]:
    if not isinstance(value, torch.Tensor):
        return ["value", value]
    dtype = dtype_name(value.dtype)
    if value.ndim:
        return ["tensor", list(value.shape), dtype]
    return ["scalar", 0.0 if value.is_meta else value.item(), dtype]


def _scalar(
    key: str, what: list[Any], source: Any, parameter: nn.Parameter, group: Mapping[str, Any]
) -> torch.Tensor:
    """A 0-dim state tensor, the rank's own or rebuilt, on the device that `load_state_dict` gives it."""
    if source is None or source.is_meta:
        source = torch.tensor(what[1], dtype=getattr(torch, what[2]), device="cpu")
    value: torch.Tensor = source.to(scalar_device(key, parameter, group, source.device))
    return value


def scalar_device(
    key: str, parameter: torch.Tensor, group: Mapping[str, Any], otherwise: torch.device
) -> torch.device:
    """Where an optimizer wants a 0-dim state tensor, by the rules of its `load_state_dict`."""
    follows = key != "step" or group.get("capturable") or group.get("fused")
    return parameter.device if follows else otherwise


def is_made_at_construction(optimizer: Optimizer, key: str, value: torch.Tensor) -> bool:
    """Whether a tensor is state that Adagrad makes for parameters on meta, and says with which value."""
    known = key == "step" or value.is_meta
    return known and "initial_accumulator_value" in optimizer.defaults
