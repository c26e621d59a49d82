"""The tensors in nested data: batches, and the outputs of modules."""

import copy
import dataclasses
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Set
from functools import lru_cache
from types import CellType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from composer_dist import _torch


def tensors_in(output: Any, above: tuple[int, ...] = ()) -> Iterator[torch.Tensor]:
    """The tensors in a module's output, including those in mappings and dataclasses.

    Args:
        above: the ids of the containers that `output` is in; a container may contain itself.
    """
    if isinstance(output, torch.Tensor):
        yield output
        return
    if isinstance(output, Mapping):
        values: Iterable[Any] = output.values()
    elif isinstance(output, (list, tuple)):
        values = output
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        values = (getattr(output, field.name) for field in dataclasses.fields(output))
    else:
        return
    if id(output) not in above:
        for value in values:
            yield from tensors_in(value, (*above, id(output)))


def named_tensors(batch: Any) -> list[tuple[str, Tensor]]:
    """The tensors that `map_tensors` would replace, with their names."""
    found: list[tuple[str, Tensor]] = []

    def note(name: str, tensor: Tensor) -> Tensor:
        found.append((name, tensor))
        return tensor

    map_tensors(note, batch)
    return found


def map_tensors(fn: Callable[[str, Tensor], Tensor], batch: Any, name: str = "") -> Any:
    """A copy of a batch with `fn(name, tensor)` in place of each tensor."""
    if isinstance(batch, Tensor):
        return fn(name, batch)
    if isinstance(batch, Mapping):
        # A copy keeps the class: a BatchEncoding, say.
        mapped: Any = copy.copy(batch) if isinstance(batch, MutableMapping) else dict(batch)
        for key, value in batch.items():
            mapped[key] = map_tensors(fn, value, _inside(name, key))
        return mapped
    if isinstance(batch, (tuple, list)):
        items = [map_tensors(fn, one, _inside(name, index)) for index, one in enumerate(batch)]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    if isinstance(batch, deque):
        return deque(
            (map_tensors(fn, one, _inside(name, index)) for index, one in enumerate(batch)), batch.maxlen
        )
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        keys = [field.name for field in dataclasses.fields(batch) if field.init]
        values = {key: map_tensors(fn, getattr(batch, key), _inside(name, key)) for key in keys}
        return dataclasses.replace(batch, **values)
    return batch


def _inside(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


_DEPTH, _MOST = 6, 1000
"""How deep `everything_in` looks, and into how many containers and objects: a cache holds layers, which hold
lists of tensors; a reference to a whole program must not make every forward slow."""


def everything_in(data: Any, objects: bool = True, seen: set[int] | None = None) -> list[Tensor]:
    """The tensors in containers of any kind, in closures and, with `objects`, in the attributes of objects.

    Optimizers are not looked into, and modules and their parameters only with `seen`.

    Args:
        seen: the ids of what is not looked into; those of what has been are added.
    """
    found: list[Tensor] = []
    values, depth = [data], 0
    passed = (ModuleType, Optimizer, nn.Module) if seen is None else (ModuleType, Optimizer)
    seen = set() if seen is None else seen
    most = len(seen) + _MOST
    while values:
        inside: list[Any] = []
        for value in values:
            if isinstance(value, Tensor):
                found.append(value)
                continue
            kind: Any = type(value)
            inner, is_object = _way_into(kind)
            if inner is None or depth > _DEPTH or id(value) in seen or len(seen) >= most:
                continue
            seen.add(id(value))
            if not is_object or (objects and not isinstance(value, passed)):
                inside += [one for one in inner(value) if type(one) not in _LEAVES]
        values, depth = inside, depth + 1
    return found


def may_hold(value: Any) -> bool:
    """Whether there can be tensors in something that is not a tensor."""
    kind: Any = type(value)
    return _way_into(kind)[0] is not None


_LEAVES: frozenset[Any] = frozenset(
    (str, bytes, int, bool, float, type, type(None), torch.dtype, torch.device)
)
_PLAIN = _LEAVES | {Tensor}


@lru_cache(1000)
def _way_into(kind: type) -> tuple[Callable[[Any], Iterable[Any]] | None, bool]:
    """How to look into what is of a class, None for what holds nothing; and whether it is not a container."""
    if issubclass(kind, tuple(_LEAVES)):
        return None, False
    if issubclass(kind, Mapping):
        return lambda mapping: mapping.values(), False
    if issubclass(kind, (list, tuple, Set, deque)):
        return lambda items: items, False
    if issubclass(kind, FunctionType):
        return _held_by_function, False
    # The attributes that are not in `__dict__`; of partials and bound methods, what they call.
    found = (one for above in kind.__mro__ for one in vars(above).values())
    slots = [one.__name__ for one in found if isinstance(one, MemberDescriptorType)]

    def attributes(value: Any) -> Iterator[Any]:
        yield from getattr(value, "__dict__", {}).values()
        for name in slots:
            yield getattr(value, name, None)

    return attributes, True


def _held_by_function(function: FunctionType) -> list[Any]:
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    return [*cells, function.__defaults__, function.__kwdefaults__, function.__dict__]


@dataclasses.dataclass
class Rejoined:
    """Puts the tensors of a copied structure into the containers of the structure it was copied from."""

    handed_out: Callable[[Tensor], Tensor] = lambda tensor: tensor
    """What is put in place of a tensor of the copied structure."""
    _changed: dict[int, Any] = dataclasses.field(default_factory=dict)
    """The containers that were changed, by id."""
    _replaced: dict[int, tuple[Tensor, Tensor, int, Any]] = dataclasses.field(default_factory=dict)
    """Each tensor that was put in place of another, by id, the other, and the first's version and history."""
    _sets: list[tuple[set[Any], set[Any], set[Any]]] = dataclasses.field(default_factory=list)
    """Sets that were changed, with what was in them and what was put in; which is which does not show."""

    def rejoin(self, own: Any, copied: Any) -> Any:
        """`own` with the tensors of `copied`: mutable containers are changed in place, others recreated."""
        if own is copied or id(own) in self._changed:
            return own
        if isinstance(own, Tensor):
            copied = self.handed_out(copied)
            self._replaced[id(copied)] = copied, own, _torch.version(copied), copied.grad_fn
            return copied
        if isinstance(own, tuple):
            pairs = zip(own, copied, strict=True)
            items = [value if value is new else self.rejoin(value, new) for value, new in pairs]
            if all(map(operator.is_, items, own)):
                return own
            return type(own)(*items) if hasattr(own, "_fields") else type(own)(items)
        if isinstance(own, set):
            self._sets.append((own, set(own), copied))
            _fill(own, copied)
            return own
        if not _is_mutable(own):
            return copied
        self._changed[id(own)] = own
        for key, value, new in _items(own, copied):
            if value is not new and (new := self.rejoin(value, new)) is not value:
                _put(own, key, new)
        return own

    def write_back(self) -> None:
        """Have what was written into tensors also reach those that they replaced: values and gradients."""
        for copied, own, version, history in self._replaced.values():
            if _torch.version(copied) != version and copied.dtype != own.dtype:
                own.copy_(copied)
            elif copied.grad_fn is not history:
                with _torch.preserve_version(own):  # the memory is the same, and has been counted
                    own.copy_(copied)

    def undo(self) -> None:
        """Put the tensors back that were replaced, wherever the containers hold them by now."""
        for container in self._changed.values():
            for key, value, _ in list(_items(container, container)):
                if id(value) in self._replaced:
                    _put(container, key, self._replaced[id(value)][1])
        for container, before, put in self._sets:
            if put <= container:
                _fill(container, before | (container - put))


def with_plain_containers(data: Any, above: tuple[int, ...] = ()) -> Any:
    """`data` with dicts and lists in place of dataclasses and of dicts and lists of other classes.

    Torch copies a container by calling its class, which may take other arguments or have side effects. And it
    looks into a container that contains itself without end; inside of itself it is None here.

    Args:
        above: the ids of the containers that `data` is in.
    """
    if type(data) in _LEAVES or isinstance(data, Tensor) or len(above) > _DEPTH:
        return data
    if id(data) in above:
        return None
    above = *above, id(data)
    if isinstance(data, dict):
        copy: Any = {
            key: value if type(value) in _PLAIN else with_plain_containers(value, above)
            for key, value in data.items()
        }
        same = all(map(operator.is_, copy.values(), data.values()))
    elif isinstance(data, (list, tuple)):
        copy = [one if type(one) in _PLAIN else with_plain_containers(one, above) for one in data]
        same = all(map(operator.is_, copy, data))
        copy = tuple(copy) if isinstance(data, tuple) else copy
    elif dataclasses.is_dataclass(data) and not isinstance(data, type):
        return {name: with_plain_containers(getattr(data, name), above) for name in _set_fields(data)}
    else:
        return data
    return data if same and (isinstance(data, tuple) or type(data) in (dict, list)) else copy


def replace_tensors(fn: Callable[[Tensor], Tensor], data: Any) -> Any:
    """`data` with `fn(tensor)` for its tensors; in its mutable containers, whoever holds them."""
    return Rejoined().rejoin(data, _torch.apply_to_tensors(fn, with_plain_containers(data)))


def copied(data: Any, known: dict[int, Any] | None = None) -> Any:
    """`data` with containers and objects of its own, which hold the same tensors, modules and functions.

    Args:
        known: the copies so far, by the id of the original.
    """
    known = {} if known is None else known
    if isinstance(data, (Tensor, ModuleType)) or callable(data) or len(known) >= _MOST:
        return data
    if id(data) in known:
        return known[id(data)]
    if isinstance(data, tuple):
        items = [copied(one, known) for one in data]
        same = all(item is before for item, before in zip(items, data, strict=True))
        return data if same else type(data)(*items) if hasattr(data, "_fields") else type(data)(items)
    if not (hasattr(data, "__dict__") or isinstance(data, (set, deque)) or _is_mutable(data)):
        return data
    try:
        new = known[id(data)] = copy.copy(data)
    except Exception:  # it refuses to be copied, as a lock does, in words of its own
        new = data
    if new is data:
        return data
    if hasattr(data, "__dict__"):
        vars(new).update({key: copied(value, known) for key, value in vars(data).items()})
    if _is_mutable(new):
        for key, value, _ in list(_items(new, new)):
            _put(new, key, copied(value, known))
    return new


def _is_mutable(value: Any) -> bool:
    return isinstance(value, (MutableMapping, list)) or dataclasses.is_dataclass(value)


def _items(container: Any, copied: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Each place of a mutable container, what is there, and what is there in a copy of the container."""
    if isinstance(container, MutableMapping):
        yield from ((key, value, copied[key]) for key, value in list(container.items()))
    elif isinstance(container, list):
        yield from ((index, *pair) for index, pair in enumerate(zip(container, copied, strict=True)))
    else:
        values = (
            copied if isinstance(copied, dict) else {n: getattr(copied, n) for n in _set_fields(container)}
        )
        yield from ((name, getattr(container, name), values[name]) for name in _set_fields(container))


def _set_fields(data: Any) -> list[str]:
    """The fields of a dataclass that have a value."""
    return [field.name for field in dataclasses.fields(data) if hasattr(data, field.name)]


def _put(container: Any, key: Any, value: Any) -> None:
    if isinstance(container, (MutableMapping, list)):
        container[key] = value
    else:
        object.__setattr__(container, key, value)  # in a frozen one too, until `undo`


def _fill(container: set[Any], values: Set[Any]) -> None:
    container.clear()
    container |= values
