"""Moves optimizers and their state to the new parameters.

Sharding makes new parameter objects, but an optimizer that was made before holds the old ones. Its groups are
rewritten in place (the dictionaries and lists stay the same objects, because schedulers hold them), and its
state is sharded like its parameter: tensors of the parameter's shape by rows, tensors in which some of its
dimensions are 1 (Adafactor's) by the others, and scalars not at all. Pending gradients are sharded too.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
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
from composer_dist.tensors.inner import dtensor_of, local_part, own_attributes
from composer_dist.wording import dtype_name


@dataclass(frozen=True)
class StateEntry:
    """One value of an optimizer's state, or a pending gradient, in plain types."""

    optimizer: int | None
    """Index of the optimizer; None for a pending gradient."""
    parameter: str
    key: str
    value: Any = None
    """The value if it is not a tensor; the number in a tensor without dimensions."""
    dtype: str | None = None
    """None if it is not a tensor."""
    shape: list[int] = field(default_factory=list)
    """A list, as in JSON, because the ranks compare entries."""

    @property
    def label(self) -> str:
        """Its name in errors."""
        if self.optimizer is None:
            return f"the gradient of {self.parameter}"
        return f"optimizer {self.optimizer}'s {self.key} of {self.parameter}"


def describe_groups(optimizers: Sequence[Optimizer], structure: Structure) -> list[list[str]]:
    """What must be equal on all ranks: classes, parameters of each group, plain hyperparameters."""
    names = names_by_id(structure)
    facts: list[list[str]] = []
    for index, optimizer in enumerate(optimizers):
        facts.append([f"optimizer {index}", type(optimizer).__name__])
        for number, group in enumerate(optimizer.param_groups):
            label = f"optimizer {index} group {number}"
            for key in sorted(group.keys() - {"params"}):
                facts.append([f"{label} {key}", repr(_in_plain_types(group[key]))])
            facts += [[f"{label} {names[id(p)]}", str(place)] for place, p in enumerate(group["params"])]
    return facts


def _in_plain_types(value: Any) -> Any:
    """A hyperparameter's numbers and texts, also in a small tensor; of anything else, the class's name."""
    if isinstance(value, torch.Tensor) and value.numel() <= _FEW and not value.is_meta:
        return value.tolist()
    if isinstance(value, (list, tuple)) and len(value) <= _FEW:
        return [_in_plain_types(one) for one in value]
    plain = value is None or isinstance(value, (bool, int, float, str))
    return value if plain else type(value).__name__


_FEW = 16
"""Elements: of a learning rate, or of two betas."""


def find_states(optimizers: Sequence[Optimizer], structure: Structure) -> Iterator[tuple[StateEntry, Any]]:
    """The optimizers' states, then the pending gradients, each with its description."""
    names = names_by_id(structure)
    for index, optimizer in enumerate(optimizers):
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                yield _describe(index, names[id(parameter)], key, value), value
    for name, held in structure.parameters.items():
        if (gradient := held.get().grad) is not None:
            yield _describe(None, name, "grad", gradient), gradient


def _describe(optimizer: int | None, name: str, key: str, value: Any) -> StateEntry:
    if not isinstance(value, torch.Tensor):
        return StateEntry(optimizer, name, key, value)
    number = None if value.ndim else 0.0 if value.is_meta else value.item()
    return StateEntry(optimizer, name, key, number, dtype_name(value.dtype), list(value.shape))


@dataclass
class Follower:
    """Moves optimizers, their state and pending gradients from old parameters to new ones."""

    optimizers: Sequence[Optimizer]
    structure: InitVar[Structure]
    """The model before it is sharded."""
    states: Sequence[StateEntry]
    """The state to build: this rank's or the first rank's."""
    here: bool
    """Whether this rank has the full tensors of the state."""
    init: frozenset[str]
    """Parameters on the meta device on all ranks, whose state is initialized."""

    def __post_init__(self, structure: Structure) -> None:
        self.old = {name: held.get() for name, held in structure.parameters.items()}
        self._names = names_by_id(structure)
        self._groups = {
            (index, self._names[id(parameter)]): group
            for index, optimizer in enumerate(self.optimizers)
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        self._new: list[tuple[StateEntry, Any]] = []

    def cargoes(self, new: Mapping[str, nn.Parameter]) -> list[Cargo]:
        """Build the state for the new parameters; return cargoes for its tensors that need values."""
        cargoes: list[Cargo] = []
        for one in self.states:
            parameter, group = new[one.parameter], {}
            if one.optimizer is not None:
                group = self._groups[one.optimizer, one.parameter]
            source = self._source(one) if self.here else None
            value = one.value
            if one.dtype is not None and not one.shape:
                value = _scalar(one, source, parameter, group)
            elif one.dtype is not None:
                value = empty_state(parameter, tuple(one.shape), getattr(torch, one.dtype))
                cargo = Cargo(one.label, Layout.of(value), value.dtype, local_part(value))
                if one.parameter in self.init:
                    cargo.target.fill_(group["initial_accumulator_value"])
                else:
                    cargo.source = source
                    cargoes.append(cargo)
            self._new.append((one, value))
        return cargoes

    def _source(self, one: StateEntry) -> Any:
        old = self.old[one.parameter]
        if one.optimizer is None:
            return old.grad
        return self.optimizers[one.optimizer].state.get(old, {}).get(one.key)

    def rebind(self, new: Mapping[str, nn.Parameter]) -> None:
        """Give every optimizer the new parameters and their state."""
        renewed = {id(old): new[name] for name, old in self.old.items() if name in new}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:  # which an earlier optimizer, its wrapper, may share
                group["params"][:] = [renewed.get(id(p), p) for p in group["params"]]
            optimizer.state.clear()
        for one, value in self._new:
            parameter = new[one.parameter]
            if one.optimizer is None:
                parameter.grad = value
            else:
                self.optimizers[one.optimizer].state.setdefault(parameter, {})[one.key] = value


def empty_state(parameter: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Uninitialized state of a parameter, of this full shape, cut like it in the dimensions they share."""
    if not isinstance(parameter, DTensor):
        return torch.empty(shape, dtype=dtype, device=parameter.device)
    mesh, here = parameter.device_mesh, local_part(parameter)
    placements, local = parameter.placements, tuple(here.shape)
    if shape != tuple(parameter.shape):
        layout, tp = Layout.of(parameter).like(shape), roles(mesh).get("tp")
        keeps = [layout.tp_dim is not None if index == tp else layout.rows for index in range(mesh.ndim)]
        placements = tuple(p if keep else Replicate() for p, keep in zip(placements, keeps, strict=True))
        local = layout.local_shape(Mesh.of(parameter).here)
    return dtensor_of(torch.empty(local, dtype=dtype, device=here.device), mesh, placements, shape)


def is_whole(value: Any, shard: torch.Tensor) -> bool:
    """Whether a value of the state is a whole tensor, while its parameter is a part of one."""
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return False
    return value.shape == shard.shape != local_part(shard).shape


def carry_attributes(old: torch.Tensor, new: nn.Parameter) -> None:
    """Copy the Python attributes and gradient hooks of a parameter to a new one."""
    new.__dict__.update(own_attributes(old))
    for hook in _torch.gradient_hooks(old):
        new.register_hook(hook)
    for hook in _torch.accumulated_gradient_hooks(old):
        new.register_post_accumulate_grad_hook(hook)


def inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that an optimizer holds as attributes, also in lists and dictionaries, at any depth."""
    found: dict[int, Optimizer] = {id(optimizer): optimizer}
    todo = list(vars(optimizer).values())
    while todo:
        one = todo.pop()
        if isinstance(one, Optimizer) and id(one) not in found:
            found[id(one)] = one
            todo += vars(one).values()
        elif type(one) in (list, tuple):
            todo += [each for each in one if isinstance(each, (Optimizer, list, tuple, dict))]
        elif type(one) is dict:
            todo += [each for each in one.values() if isinstance(each, (Optimizer, list, tuple, dict))]
    return list(found.values())[1:]


def is_low_bit(optimizer: Optimizer) -> bool:
    """Whether it quantizes its state on each rank separately, as `torchao.optim` does."""
    return hasattr(optimizer, "_new_buffer")


def low_bit_state(optimizer: Optimizer, parameter: torch.Tensor, key: str) -> torch.Tensor:
    """Zeros as an optimizer with quantized state makes them for a parameter."""
    made: torch.Tensor = optimizer._new_buffer(parameter, key == "exp_avg")  # type: ignore[attr-defined]
    return made


def names_by_id(structure: Structure) -> dict[int, str]:
    """Every parameter's first name, by the object's identity."""
    return {id(held.get()): name for name, held in structure.parameters.items()}


def _scalar(one: StateEntry, source: Any, parameter: nn.Parameter, group: Mapping[str, Any]) -> torch.Tensor:
    """A 0-dim state tensor, the rank's own or rebuilt, on the device that `load_state_dict` uses."""
    if source is None or source.is_meta:
        source = torch.tensor(one.value, dtype=getattr(torch, str(one.dtype)), device="cpu")
    value: torch.Tensor = source.to(scalar_device(one.key, parameter, group, source.device))
    return value


def scalar_device(
    key: str, parameter: torch.Tensor, group: Mapping[str, Any], otherwise: torch.device
) -> torch.device:
    """The device of a 0-dim state tensor, by the rules of `Optimizer.load_state_dict`."""
    follows = key != "step" or group.get("capturable") or group.get("fused")
    return parameter.device if follows else otherwise


def is_made_at_construction(optimizer: Optimizer, key: str, value: torch.Tensor) -> bool:
    """Whether a tensor is state of Adagrad's, which it makes for meta parameters with a known value."""
    known = key == "step" or value.is_meta
    return known and "initial_accumulator_value" in optimizer.defaults
