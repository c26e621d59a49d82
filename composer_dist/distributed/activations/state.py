"""What a block's forward finds in its modules, and in the random generators of Python and numpy.

A forward that is repeated must find it again, and leave what it changes as it was.
"""

import random
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from composer_dist import _torch
from composer_dist.distributed.prepared import ADDED
from composer_dist.errors import ParallelismRuntimeError
from composer_dist.random_states import set_host_states, states_outside_torch
from composer_dist.tensors.nested import everything_in

Place = tuple[nn.Module, str]
_REGISTERED = frozenset(vars(nn.Module())) - {"training"}
_DEPTH = 2
"""How deep to look into what is held in attributes."""
SMALL = 1 << 16
"""Most elements of a tensor that is copied until the backward without knowing whether it changes."""


def held(block: nn.Module, kind: str) -> dict[Place, Tensor]:
    """The tensors of a block by where they are held: "_parameters" or "_buffers"."""
    found = (
        (module, key, tensor) for module in block.modules() for key, tensor in vars(module)[kind].items()
    )
    return {(module, key): tensor for module, key, tensor in found if tensor is not None}


def held_untrained(block: nn.Module) -> dict[Place, Tensor]:
    """A block's buffers, and the tensors without gradients that its modules hold as plain attributes."""
    attributes = (
        (module, key, value) for module in block.modules() for key, value in _attributes(module).items()
    )
    return held(block, "_buffers") | {
        (module, key): value
        for module, key, value in attributes
        if isinstance(value, Tensor) and not (value.requires_grad or value.is_inference())
    }


@contextmanager
def exchanged(tensors: Mapping[Place, Tensor]) -> Iterator[None]:
    """Inside, modules hold these tensors in place of their own."""
    own = [(_holder(module, key), key) for module, key in tensors]
    before = [holder[key] for holder, key in own]
    try:
        for (holder, key), tensor in zip(own, tensors.values(), strict=True):
            holder[key] = tensor
        yield
    finally:
        for (holder, key), tensor in zip(own, before, strict=True):
            holder[key] = tensor


def _holder(module: nn.Module, key: str) -> dict[str, Any]:
    own = vars(module)
    return next((own[kind] for kind in ("_buffers", "_parameters") if key in own[kind]), own)


def clones(tensors: Mapping[Place, Tensor]) -> dict[Place, Tensor]:
    """Copies that share memory with each other where the tensors do."""
    ones = {id(one): one for one in tensors.values()}
    new = {key: one.clone() for key, one in ones.items()}
    spans = [(*_span(one), key, one) for key, one in ones.items() if _is_ordinary(one)]
    groups: list[list[Any]] = []
    for start, end, _, one in sorted(spans):
        if groups and start < groups[-1][1]:
            groups[-1][1] = max(groups[-1][1], end)
            groups[-1][2].append(one)
        else:
            groups.append([start, end, [one]])
    for start, end, members in groups:
        if len(members) > 1:
            first = start - start % 16
            memory = torch.empty(end - first, dtype=torch.uint8, device=members[0].device)
            for one in members:
                offset = _span(one)[0] - first
                whole = memory[offset : offset + (end - first - offset) // one.itemsize * one.itemsize]
                new[id(one)] = whole.view(one.dtype).as_strided(one.shape, one.stride()).copy_(one)
    return {place: new[id(one)] for place, one in tensors.items()}


def _is_ordinary(one: Tensor) -> bool:
    return type(one) is Tensor and one.layout is torch.strided and not one.is_meta and one.numel() > 0


def _span(one: Tensor) -> tuple[int, int]:
    """The addresses where its memory begins and ends."""
    reach = sum((size - 1) * step for size, step in zip(one.shape, one.stride(), strict=True)) + 1
    return one.data_ptr(), one.data_ptr() + reach * one.itemsize


class BlockState:
    """The attributes of a block's modules, what is inside of them, and random generators, as they are now.

    Containers with tensors that have gradients are left out if a forward changes them: they would hold the
    graph of an earlier step.
    """

    def __init__(self, block: nn.Module) -> None:
        self._attributes = {module: _attributes(module) for module in block.modules()}
        self._inner = list(_insides(value for own in self._attributes.values() for value in own.values()))
        for own in self._attributes.values():
            own.update({key: _WithGradient(value) for key, value in own.items() if _has_gradient(value)})
        self._random = states_outside_torch()

    def drop_unchanged(self) -> None:
        """Forget the insides that a forward has not changed, so that nothing writes into them."""
        changed = ((one, then) for one, then in self._inner if not _is_same(_inside(one), then))
        free = ((one, then) for one, then in changed if not any(map(_has_gradient, everything_in(then))))
        self._inner = list(free)

    def counted(self) -> dict[Place, int]:
        """By how much whole numbers among the attributes differ now."""
        return {
            (module, key): now - then
            for module, attributes in self._attributes.items()
            for key, now in _attributes(module).items()
            if type(now) is int
            and type(then := attributes.get(key, getattr(type(module), key, None))) is int
            and now != then
        }

    def exchange(self) -> "BlockState":
        """Have everything as it was; return what it was until now."""
        now = object.__new__(BlockState)
        now._attributes = {module: _attributes(module) for module in self._attributes}
        before = {module: _before(module, attributes) for module, attributes in self._attributes.items()}
        now._inner = [(one, _inside(one)) for one, _ in self._inner]
        now._random = states_outside_torch()
        for module, attributes in before.items():
            for key in now._attributes[module].keys() - attributes.keys():
                del vars(module)[key]
            vars(module).update(attributes)
        for one, then in self._inner:
            _put_back(one, then)
        set_host_states(self._random)
        return now


class Counts:
    """Numbers that a block counts up show its recomputations to others, but not to its own forward."""

    def __init__(self) -> None:
        self._more: dict[Place, tuple[int, int]] = {}
        """By how much recomputations have changed a number, and what it has been since."""

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Inside, the numbers are what they are without recomputation."""
        more = {
            (module, key): more
            for (module, key), (more, shown) in self._more.items()
            if vars(module).get(key) == shown  # or else the user has set it
        }
        self._more = {}
        self.add({place: -one for place, one in more.items()})
        self._more = {}
        try:
            yield
        finally:
            self.add(more)

    def add(self, more: Mapping[Place, int]) -> None:
        """Recomputations have changed numbers."""
        for (module, key), one in more.items():
            if type(vars(module).get(key)) is int:
                before, shown = self._more.get((module, key), (0, 0))
                more_now = one + (before if vars(module)[key] == shown else 0)
                vars(module)[key] += one
                self._more[module, key] = more_now, vars(module)[key]


class _WithGradient:
    """A tensor with a gradient, without the graph of an earlier step that it would hold."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = weakref.ref(tensor), _torch.version(tensor)
        alias = tensor.detach()
        self._value = alias.clone() if alias.numel() <= SMALL else alias

    def again(self, now: Any, name: str) -> Tensor:
        """The tensor itself if `now` is still that, unchanged; or else one with its value and a gradient."""
        tensor = self._tensor()
        if tensor is not None and now is tensor and _torch.has_version(tensor, self._version):
            return tensor
        if self._value.numel() > SMALL and not _torch.has_version(self._value, self._version):
            raise ParallelismRuntimeError(
                f"{name}, in a recomputed block, was changed in place after its forward found it, and before "
                "backward has recomputed it. Assign a new tensor instead (self.h = self.h + x for "
                "self.h += x), or leave the module out of activation checkpointing."
            )
        return self._value.detach().requires_grad_().clone()  # not a leaf, which nothing may change in place


def _before(module: nn.Module, attributes: Mapping[str, Any]) -> dict[str, Any]:
    own, kind = vars(module), type(module).__name__
    return {
        key: value.again(own.get(key), f"{key} of a {kind}") if isinstance(value, _WithGradient) else value
        for key, value in attributes.items()
    }


def _attributes(module: nn.Module) -> dict[str, Any]:
    """What a module holds that is not registered with it, and not put there by this library or FSDP2."""
    return {
        key: value
        for key, value in vars(module).items()
        if key not in _REGISTERED and key != "forward" and not key.startswith(ADDED)
    }


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


_LEAVES: frozenset[Any] = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device, Tensor))


def _insides(values: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
    """The containers, objects and generators among values and inside of them, and what each holds."""
    pending = [(value, 1) for value in values]
    seen: set[int] = set()
    while pending:
        one, depth = pending.pop()
        if type(one) in _LEAVES or id(one) in seen:
            continue
        seen.add(id(one))
        if (then := _inside(one)) is not None:
            yield one, then
            if depth < _DEPTH and isinstance(then, (dict, list)):
                pending += [
                    (value, depth + 1) for value in (then.values() if isinstance(then, dict) else then)
                ]


def _inside(one: Any) -> Any:
    """A copy of what a container, an object or a generator holds; None for everything else."""
    if isinstance(one, dict):
        return dict(one)
    if isinstance(one, (list, set)):
        return list(one) if isinstance(one, list) else set(one)
    if isinstance(one, deque):
        return deque.copy(one)
    if isinstance(one, random.Random):
        return one.getstate()
    if isinstance(one, (torch.Generator, numpy.random.RandomState)):
        return one.get_state()
    if isinstance(one, numpy.random.Generator):
        return one.bit_generator.state
    if callable(one) or isinstance(one, Tensor):
        return None
    return dict(vars(one)) if hasattr(one, "__dict__") else None


def _is_same(now: Any, then: Any) -> bool:
    if isinstance(then, dict):
        return now.keys() == then.keys() and all(now[key] is value for key, value in then.items())
    if isinstance(then, (list, deque)):
        return len(now) == len(then) and all(a is b for a, b in zip(now, then, strict=True))
    return isinstance(then, set) and len(now) == len(then) and now == then


def _put_back(one: Any, then: Any) -> None:
    if isinstance(one, (torch.Generator, numpy.random.RandomState)):
        one.set_state(then)
    elif isinstance(one, random.Random):
        one.setstate(then)
    elif isinstance(one, numpy.random.Generator):
        one.bit_generator.state = then
    elif isinstance(one, (list, deque)):
        one.clear()
        one.extend(then)
    else:
        inner = one if isinstance(one, (dict, set)) else vars(one)
        inner.clear()
        inner.update(then)
