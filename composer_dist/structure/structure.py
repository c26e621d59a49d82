"""A model's modules, its tensors, and every place where a tensor is registered.

A *place* is a module and the key under which it holds a tensor. A *tensor* of the model is one object
with all of its places: a parameter with several places is a *tie*, a module with several names is a
*duplicate*. Tensors that modules keep as plain attributes (rotary tables, for example) are listed too,
because they move with the model.

Nothing here needs a process group or real values, so models on the meta device are supported.
"""

import hashlib
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn

from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.structure.names import EXTRA_STATE, ancestors, canonical_name, child_name
from composer_dist.tensors.inner import Inner, describe_inner
from composer_dist.wording import listed

Kind = Literal["parameter", "buffer", "attribute"]


@dataclass(frozen=True, slots=True)
class Registration:
    """One registration of a tensor: `module` holds it under `key`."""

    module: nn.Module
    kind: Kind
    key: str

    def get(self) -> torch.Tensor:
        """The tensor held now."""
        return self._home()[self.key]  # type: ignore[no-any-return]

    def put(self, tensor: torch.Tensor) -> None:
        """Hold `tensor` instead, through the module's own `__setattr__` if it has one, as `nn.LSTM` does."""
        if self.kind == "parameter" and type(self.module).__setattr__ is not nn.Module.__setattr__:
            setattr(self.module, self.key, tensor)
            if self.get() is not tensor:
                raise ParallelismTypeError(
                    f"{type(self.module).__name__}.__setattr__ does not store the given parameter "
                    f"{self.key!r}, so it cannot be sharded. Change it, or leave the module out with "
                    "Rule(..., shard=False)."
                )
        else:
            self._home()[self.key] = tensor

    @property
    def key_of(self) -> tuple[int, str]:
        """The identity of the place, for lookups."""
        return id(self.module), self.key

    def _home(self) -> dict:  # type: ignore[type-arg]
        if self.kind == "parameter":
            return self.module._parameters
        return self.module._buffers if self.kind == "buffer" else vars(self.module)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The facts about a tensor of the model, for the plan and for other ranks."""

    name: str
    """Its first name."""
    names: tuple[str, ...]
    """All of its names, in the order of the module tree."""
    owners: tuple[str, ...]
    """The names of the modules that hold it directly, one per name."""
    kind: Kind
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    inner: tuple[Inner, ...] = ()
    """Its inner tensors, if its class has a codec."""

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor in bytes."""
        if self.inner:
            return sum(inner.nbytes for inner in self.inner)
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor of the model and the places that hold it."""

    info: TensorInfo
    places: tuple[Registration, ...]

    def get(self) -> torch.Tensor:
        """The tensor that the first place holds."""
        return self.places[0].get()

    def cast_shadow(self) -> torch.Tensor:
        """Hold a contiguous parameter on the meta device instead; return the tensor held before."""
        before = self.get()
        empty = torch.empty(self.info.shape, dtype=self.info.dtype, device="meta")
        self.put(nn.Parameter(empty, requires_grad=self.info.requires_grad))
        return before

    def put(self, tensor: torch.Tensor) -> None:
        """Hold `tensor` in every place, so that ties stay ties."""
        for place in self.places:
            place.put(tensor)


@dataclass(frozen=True)
class Structure:
    """A model's modules and tensors by name."""

    modules: dict[str, nn.Module]
    """Every name of every module, "" being the root, parents before children."""
    tensors: dict[str, Held]
    """First name to tensor."""
    first: dict[str, str]
    """Every name of a module to its first one."""

    @cached_property
    def parameters(self) -> dict[str, Held]:
        """First name to parameter."""
        return {name: held for name, held in self.tensors.items() if held.info.kind == "parameter"}

    def inside(self, modules: Collection[str]) -> dict[str, list[TensorInfo]]:
        """The tensors that each of these modules, or one below it, holds under one of their names."""
        found: dict[str, list[TensorInfo]] = {name: [] for name in modules}
        for held in self.tensors.values():
            around = {above: None for owner in held.info.owners for above in ancestors(owner)}
            for name in around:
                if name in found:
                    found[name].append(held.info)
        return found

    @cached_property
    def extra_states(self) -> dict[str, nn.Module]:
        """The names of extra state in `state_dict()`, to the modules that have it."""
        return {
            child_name(canonical_name(path), EXTRA_STATE): module
            for path, module in _walk(self.modules[""])
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }

    @cached_property
    def digest(self) -> str:
        """A hash of all names, shapes, dtypes, `requires_grad` flags, ties and inner tensors."""
        facts = [describe(held.info) for held in self.tensors.values()]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def describe(info: TensorInfo) -> list[object]:
    """`info` in plain types, to compare with another rank's."""
    inner = [[one.name, list(one.shape), str(one.dtype)] for one in info.inner]
    return [list(info.names), info.kind, list(info.shape), str(info.dtype), info.requires_grad, inner]


def read_structure(model: nn.Module) -> Structure:
    """List the modules and tensors of `model`, names without wrapper segments.

    Raises:
        ParallelismValueError: names modules that are lazy and have no shapes yet.
    """
    modules: dict[str, nn.Module] = {}
    registered: dict[int, list[tuple[str, Registration]]] = {}  # owner and place, by tensor
    for path, module in _walk(model):
        name = canonical_name(path)
        modules.setdefault(name, module)  # a wrapper comes before the module it wraps, and represents it
        for place in _places(module):
            registered.setdefault(id(place.get()), []).append((name, place))
    first_of: dict[int, str] = {}
    first = {name: first_of.setdefault(id(module), name) for name, module in modules.items()}
    if lazy := [name for ((name, place), *_) in registered.values() if nn.parameter.is_lazy(place.get())]:
        raise ParallelismValueError(
            f"{listed(list(dict.fromkeys(lazy)))}: a lazy module has no shapes before its first call. Run "
            "one batch through the model first, and build the optimizer after it."
        )
    same: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    tensors = {held.info.name: held for held in (_held(one, same) for one in registered.values())}
    return Structure(modules, tensors, first)


def _held(registered: list[tuple[str, Registration]], same: dict[tuple[Any, ...], tuple[Any, ...]]) -> Held:
    """A tensor by its places; `same` keeps one object of equal owners or shapes, which take memory."""
    names = tuple(child_name(owner, place.key) for owner, place in registered)
    owners = tuple(owner for owner, _ in registered)
    owners = same.setdefault(owners, owners)
    places = tuple(dict.fromkeys(place for _, place in registered))  # a duplicate module has one set
    kinds: tuple[Kind, ...] = ("parameter", "buffer", "attribute")
    kind = next(kind for kind in kinds if any(place.kind == kind for place in places))
    one = places[0].get()
    shape, inner = tuple(one.shape), describe_inner(one)
    shape = same.setdefault(shape, shape)
    info = TensorInfo(names[0], names, owners, kind, shape, one.dtype, one.requires_grad, inner)
    return Held(info, places)


def _walk(
    module: nn.Module, prefix: str = "", path: frozenset[int] = frozenset()
) -> Iterator[tuple[str, nn.Module]]:
    """Like `named_modules(remove_duplicate=False)`, but supports a module that contains itself."""
    if id(module) in path:
        return
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, child_name(prefix, name), path | {id(module)})


def _places(module: nn.Module) -> Iterator[Registration]:
    holders: tuple[tuple[Kind, dict[str, Any]], ...] = (
        ("parameter", module._parameters),
        ("buffer", module._buffers),
        ("attribute", vars(module)),
    )
    for kind, held in holders:
        yield from (
            Registration(module, kind, key) for key, one in held.items() if isinstance(one, torch.Tensor)
        )
