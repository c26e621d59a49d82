"""The optimizer follows its parameters, state included.

Sharding makes new parameter objects. An optimizer that was made before holds the old ones: stepping
it would move tensors that no module has any more. So its groups are rewritten in place (the group
dictionaries and their lists stay the same objects, for schedulers hold them), and its state is sharded
as its parameter is: a tensor of the parameter's shape row by row, one that is the parameter's shape
with some dimensions reduced to 1 (Adafactor's) by its remaining dimensions, scalars as they are.
Pending gradients go the same way. Optimizers that torch cannot step on shards are refused.
"""

from __future__ import annotations

import gc
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

_GRADIENTS = "gradients"
"""The entry of pending gradients in a description; those of states have a slash."""

_UNABLE: dict[str, tuple[int, str]] = {
    "LBFGS": (1, "it steps along one flat vector of all parameters"),
    "SparseAdam": (1, "sharded gradients are dense"),
    "Rprop": (1, "DTensor (torch 2.13) has no masked assignment, which it uses"),
    "Adafactor": (2, "DTensor (torch 2.13) cannot square its norms over sharded rows in place"),
}
"""torch.optim classes that cannot step on sharded parameters: from which number of dimensions, and why."""


def check_optimizers(optimizers: Sequence[Optimizer], structure: Structure, plain: Mapping[str, str]) -> None:
    """Refuse optimizers that could not follow their parameters.

    Raises:
        ParallelismTypeError: not an optimizer.
        ParallelismValueError: parameters of another model (with their number), state that cannot be
            sharded, a `foreach` or `fused` group that mixes sharded and replicated parameters, only
            frozen parameters where the model has trainable ones.
    """
    names = _names(structure)
    faults: list[str] = []
    for index, optimizer in enumerate(optimizers):
        if not isinstance(optimizer, Optimizer):
            raise ParallelismTypeError(
                f"optimizer {index} is a {type(optimizer).__name__}, not an Optimizer."
            )
        label = type(optimizer).__name__
        label = f"optimizer {index} ({label})" if len(optimizers) > 1 else label
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        foreign = [parameter for parameter in [*held, *optimizer.state] if id(parameter) not in names]
        if foreign:
            shape = tuple(getattr(foreign[0], "shape", ()))
            faults.append(
                f"{label} holds {len(foreign)} parameters (of {len(held)}) that are not this model's, the "
                f"first of shape {shape}; build it from the parameters of the model that is prepared, and "
                "before it is prepared."
            )
            continue
        frozen = held and not any(parameter.requires_grad for parameter in held)
        if frozen and any(held.info.requires_grad for held in structure.parameters.values()):
            faults.append(
                f"{label} holds only frozen parameters ({len(held)}), while others of the model are "
                "trainable: it would move nothing. Build it after freezing (an adapter freezes its base), "
                "from the parameters with requires_grad."
            )
            continue
        ndim, why = _unable(optimizer)
        unable = [names[id(p)] for p in held if ndim and p.ndim >= ndim and names[id(p)] not in plain]
        if unable:
            faults.append(
                f"{label} cannot step on sharded parameters ({_list(unable)}): {why}. Take another "
                "optimizer, or leave their modules replicated with Rule(..., shard=False)."
            )
            continue
        for number, group in enumerate(optimizer.param_groups):
            mode = next((mode for mode in ("foreach", "fused") if group.get(mode)), None)
            whole = [names[id(p)] for p in group["params"] if names[id(p)] in plain]
            if mode and whole and len(whole) < len(group["params"]):
                faults.append(
                    f"{label} group {number} has {mode}=True but would mix sharded parameters with the "
                    f"replicated {_list(whole)}; give those a group of their own, or leave {mode} out."
                )
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if fault := _state_fault(value, parameter):
                    faults.append(f"{label} state {key!r} of {names[id(parameter)]}: {fault}")
    if faults:
        raise ParallelismValueError("\n".join(faults))


def describe_groups(optimizers: Sequence[Optimizer], structure: Structure) -> list[list[str]]:
    """What must be alike on all ranks: classes, parameters of each group, plain hyperparameters."""
    names = _names(structure)
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
    return found | ({_GRADIENTS: gradients} if gradients else {})


def state_tensors(optimizers: Sequence[Optimizer], structure: Structure) -> dict[str, torch.Tensor]:
    """The real tensors of states and pending gradients, by what to call them in an error."""
    names = _names(structure)
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
        mesh: the ranks.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        structure: Structure,
        description: Description,
        here: bool,
        init: frozenset[str],
        mesh: DeviceMesh,
    ) -> None:
        self._optimizers = optimizers
        self._description = description
        self._here = here
        self._init = init
        self._ranks = Ranks.of(mesh)
        self._old = {name: held.get() for name, held in structure.parameters.items()}
        self._names = _names(structure)
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


def check_refills(optimizers: Sequence[Optimizer], structure: Structure, init: frozenset[str]) -> None:
    """Refuse state on the meta device that nobody can give values to.

    Adagrad makes its state at construction, and says with which value.

    Raises:
        ParallelismValueError: names the state.
    """
    names = _names(structure)
    faults = [
        f"{type(optimizer).__name__} state {key!r} of {names[id(parameter)]}"
        for optimizer in optimizers
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
        and names[id(parameter)] in init
        and not _is_made_at_construction(optimizer, key, value)
    ]
    if faults:
        raise ParallelismValueError(
            f"{'; '.join(faults)}: its parameter is on the meta device, without values. Prepare the model "
            "before the first step."
        )


def forgotten_optimizers(optimizers: Sequence[Optimizer], structure: Structure) -> list[str]:
    """Optimizers of this process that hold the model's parameters but were not handed in.

    They would go on stepping the parameters from before, which no module has any more. Found among the
    objects that the garbage collector knows; one that the caller has dropped may be among them.
    """
    names = _names(structure)
    known = {id(optimizer) for optimizer in optimizers}
    found = []
    for thing in gc.get_objects():
        if issubclass(type(thing), Optimizer) and id(thing) not in known:
            held = [p for group in thing.param_groups for p in group["params"] if id(p) in names]
            if held:
                found.append(
                    f"{type(thing).__name__} holds {len(held)} parameters of this model, but was not passed: "
                    "it will move nothing. Pass it as optimizer=, or build it after preparation."
                )
    return found


def carry_attributes(old: torch.Tensor, new: nn.Parameter) -> None:
    """Give a new parameter the Python attributes and the gradient hooks of the old one."""
    new.__dict__.update(vars(old))
    for hook in (old._backward_hooks or {}).values():
        new.register_hook(hook)
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
        return f"a {type(value).__name__} cannot be sharded; prepare the model before the first step."
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
    return ["scalar", 0.0 if value.is_meta else value.item(), dtype]


def _scalar(
    key: str, what: list[Any], source: Any, parameter: nn.Parameter, group: Mapping[str, Any]
) -> torch.Tensor:
    """A 0-dim state tensor, the rank's own or rebuilt, on the device that `load_state_dict` gives it."""
    if source is None or source.is_meta:
        source = torch.tensor(what[1], dtype=getattr(torch, what[2]), device="cpu")
    follows = key != "step" or group.get("capturable") or group.get("fused")
    value: torch.Tensor = source.to(parameter.device) if follows else source
    return value


def _is_made_at_construction(optimizer: Optimizer, key: str, value: torch.Tensor) -> bool:
    """Whether a tensor is state that Adagrad makes for parameters on meta, and says with which value."""
    known = key == "step" or value.is_meta
    return known and "initial_accumulator_value" in optimizer.defaults


def _unable(optimizer: Optimizer) -> tuple[int, str]:
    """From how many dimensions a sharded parameter is too much for this optimizer (0: never), and why."""
    for cls in type(optimizer).__mro__:
        if cls.__module__.startswith("torch.optim") and cls.__name__ in _UNABLE:
            return _UNABLE[cls.__name__]
    return 0, ""


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} others" if len(names) > 4 else "")
