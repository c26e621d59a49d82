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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from composer_dist.distributed.aliases import Structure
from composer_dist.distributed.sync import Cargo, Ranks, elements_of
from composer_dist.errors import ParallelismTypeError, ParallelismValueError

Description = dict[str, Any]
"""State in plain types: optimizer index and parameter name to key to what is held there."""


def check_optimizers(
    optimizers: Sequence[Optimizer], structure: Structure, plain: Mapping[str, str]
) -> None:
    """Refuse optimizers that could not follow their parameters.

    Raises:
        ParallelismTypeError: not an optimizer.
        ParallelismValueError: parameters of another model (with their number), state that cannot be
            sharded, a `foreach` or `fused` group that mixes sharded and replicated parameters.
    """
    names = _names(structure)
    faults: list[str] = []
    for index, optimizer in enumerate(optimizers):
        if not isinstance(optimizer, Optimizer):
            raise ParallelismTypeError(
                f"optimizer {index} is a {type(optimizer).__name__}, not an Optimizer."
            )
        label = (
            f"optimizer {index} ({type(optimizer).__name__})"
            if len(optimizers) > 1
            else type(optimizer).__name__
        )
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        foreign = [parameter for parameter in held if id(parameter) not in names]
        if foreign:
            faults.append(
                f"{label} holds {len(foreign)} parameters (of {len(held)}) that are not this model's, the "
                f"first of shape {tuple(foreign[0].shape)}; build it from the parameters of the model that "
                "is prepared, and before it is prepared."
            )
            continue
        for number, group in enumerate(optimizer.param_groups):
            mode = next((mode for mode in ("foreach", "fused") if group.get(mode)), None)
            whole = [
                names[id(parameter)]
                for parameter in group["params"]
                if names[id(parameter)] in plain
            ]
            if mode and whole and len(whole) < len(group["params"]):
                faults.append(
                    f"{label} group {number} has {mode}=True but would mix sharded parameters with the "
                    f"replicated {', '.join(whole[:4])}; give those a group of their own, or leave {mode} out."
                )
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                fault = _state_fault(value, parameter)
                if fault:
                    faults.append(f"{label} state {key!r} of {names[id(parameter)]}: {fault}")
    if faults:
        raise ParallelismValueError("\n".join(faults))


def describe_states(optimizers: Sequence[Optimizer], structure: Structure) -> Description:
    """What state, and which pending gradients, this rank has, in plain types."""
    names = _names(structure)
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
    if gradients:
        found["gradients"] = gradients
    return found


class Follower:
    """Moves optimizers, their state and pending gradients from old parameters to new ones.

    Args:
        description: the state to build, this rank's own or the first rank's.
        here: whether this rank has the tensors of the state, full.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        structure: Structure,
        description: Description,
        here: bool,
        mesh: DeviceMesh,
    ) -> None:
        self._optimizers = optimizers
        self._description = description
        self._here = here
        self._mesh = mesh
        self._ranks = Ranks.of(mesh)
        self._old = {name: held.get() for name, held in structure.parameters.items()}
        self._names = _names(structure)
        self._states: dict[str, dict[str, Any]] = {}

    def cargoes(self, new: Mapping[str, nn.Parameter]) -> list[Cargo]:
        """Build the state for the new parameters; its large tensors are yet to be delivered."""
        cargoes: list[Cargo] = []
        for entry, keys in self._description.items():
            for key, what in keys.items():
                if entry == "gradients":
                    name, source = key, self._old[key].grad
                    home, slot = self._states.setdefault(entry, {}), key
                else:
                    index, _, name = entry.partition("/")
                    source = self._optimizers[int(index)].state.get(self._old[name], {}).get(key)
                    home, slot = self._states.setdefault(entry, {}), key
                if what[0] != "tensor":
                    home[slot] = source if self._here and source is not None else _rebuild(what)
                    continue
                value, cargo = self._allocate(f"{entry}/{key}", new[name], tuple(what[1]), what[2])
                home[slot] = value
                if source is not None and source.is_meta:
                    self._refill(entry, key, cargo.target)
                else:
                    cargo.source = source if self._here else None
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
        for name, gradient in self._states.get("gradients", {}).items():
            new[name].grad = gradient

    def _allocate(
        self, label: str, parameter: nn.Parameter, shape: tuple[int, ...], dtype: str
    ) -> tuple[torch.Tensor, Cargo]:
        """Uninitialised state laid out like its parameter, and the cargo that will fill it."""
        kind = getattr(torch, dtype)
        by_rows = isinstance(parameter, DTensor) and shape[0] == parameter.shape[0]
        device = parameter.to_local().device if isinstance(parameter, DTensor) else parameter.device
        cargo = Cargo(label, shape, kind, by_rows, torch.empty(0))
        first, last = elements_of(cargo, self._ranks.shards, self._ranks.shard)
        local_shape = shape
        if by_rows:
            row = torch.Size(shape[1:]).numel()
            local_shape = ((last - first) // row if row else 0, *shape[1:])
        cargo.target = torch.empty(local_shape, dtype=kind, device=device)
        if not isinstance(parameter, DTensor):
            return cargo.target, cargo
        placements = parameter.placements if by_rows else [Replicate()] * parameter.device_mesh.ndim
        stride = torch.empty(shape, device="meta").stride()
        value = DTensor.from_local(
            cargo.target,
            parameter.device_mesh,
            placements,
            run_check=False,
            shape=torch.Size(shape),
            stride=stride,
        )
        return value, cargo

    def _refill(self, entry: str, key: str, target: torch.Tensor) -> None:
        """State that an optimizer made on the meta device, at its construction."""
        index, _, name = entry.partition("/")
        optimizer = self._optimizers[int(index)]
        for group in optimizer.param_groups:
            if any(self._names[id(p)] == name for p in group["params"]):
                target.fill_(group["initial_accumulator_value"])


def check_refills(
    optimizers: Sequence[Optimizer], structure: Structure, init: frozenset[str]
) -> None:
    """Refuse state on the meta device that nobody can give values to.

    Adagrad makes its state at construction, and says with which value.

    Raises:
        ParallelismValueError: names the state.
    """
    names = _names(structure)
    faults = [
        f"{type(optimizer).__name__} state {key!r} of {names[id(parameter)]}"
        for optimizer in optimizers
        if "initial_accumulator_value" not in optimizer.defaults
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if names[id(parameter)] in init and isinstance(value, torch.Tensor) and value.is_meta
    ]
    if faults:
        raise ParallelismValueError(
            f"{'; '.join(faults)}: on the meta device, without values. Prepare the model before the first step."
        )


def carry_attributes(old: torch.Tensor, new: nn.Parameter) -> None:
    """Give a new parameter the Python attributes and post-accumulate-gradient hooks of the old one."""
    new.__dict__.update(vars(old))
    for hook in (old._post_accumulate_grad_hooks or {}).values():
        new.register_post_accumulate_grad_hook(hook)


def check_hooks(structure: Structure, plain: Mapping[str, str]) -> None:
    """Refuse gradient hooks on parameters that will be sharded: FSDP2 would drop them.

    Raises:
        ParallelismValueError: names the parameters.
    """
    hooked = [
        name
        for name, held in structure.parameters.items()
        if name not in plain and held.get()._backward_hooks
    ]
    if hooked:
        raise ParallelismValueError(
            f"Gradient hooks (Tensor.register_hook) on {', '.join(hooked)} cannot be kept: the gradient "
            "they would see is reduced and sharded. Use register_post_accumulate_grad_hook, or register "
            "after preparation."
        )


def _names(structure: Structure) -> dict[int, str]:
    return {id(held.get()): name for name, held in structure.parameters.items()}


def _state_fault(value: Any, parameter: torch.Tensor) -> str | None:
    if value is None or isinstance(value, (bool, int, float)):
        return None
    if not isinstance(value, torch.Tensor):
        return (
            f"a {type(value).__name__} cannot be sharded; prepare the model before the first step."
        )
    if value.ndim == 0:
        return None
    fits = value.ndim == parameter.ndim and all(
        have in (want, 1) for have, want in zip(value.shape, parameter.shape, strict=True)
    )
    if fits and not isinstance(value, DTensor):
        return None
    return (
        f"shape {tuple(value.shape)} does not follow from the parameter's {tuple(parameter.shape)}, so it "
        "cannot be sharded; prepare the model before the first step."
    )


def _describe(value: Any) -> list[Any]:
    if not isinstance(value, torch.Tensor):
        return ["value", value]
    dtype = str(value.dtype).removeprefix("torch.")
    if value.ndim:
        return ["tensor", list(value.shape), dtype]
    return ["scalar", value.item(), dtype]


def _rebuild(what: list[Any]) -> Any:
    if what[0] == "value":
        return what[1]
    return torch.tensor(what[1], dtype=getattr(torch, what[2]))
