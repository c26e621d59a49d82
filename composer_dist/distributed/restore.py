"""What a preparation changes in modules: noted while it is done, and put back.

Classes, attributes, hooks and submodules are compared before and after, so no feature of the recipe can be
forgotten. Tensors are left out. What other code has changed since stays as it is.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer_dist import _torch
from composer_dist.distributed.prepared import RECORD, Prepared, of, record
from composer_dist.wording import listed

_REGISTERED = {key for key, value in vars(nn.Module()).items() if isinstance(value, dict)}
_COMPARED = _REGISTERED - {"_parameters", "_buffers"}
"""The dictionaries of a module for hooks and submodules."""
_LEFT_OUT = (Tensor, Prepared)
_ABSENT = object()
_Contents = dict[str | None, dict[Any, Any]]


def _held_by(module: nn.Module) -> _Contents:
    """Its attributes, under None, and its compared dictionaries that are not empty, by name."""
    own = vars(module)
    held: _Contents = {None: own.copy()}
    for name in _COMPARED:
        if (value := own.get(name)) and isinstance(value, dict):  # torch.jit keeps them elsewhere
            held[name] = dict(value)
    return held


@dataclass
class _ModuleThen:
    """A module at one moment."""

    kind: type[nn.Module]
    known: Prepared | None
    held: _Contents

    @classmethod
    def read(cls, module: nn.Module) -> "_ModuleThen":
        return cls(type(module), _copied(of(module)), _held_by(module))

    def changes(self, module: nn.Module) -> Iterator[tuple[tuple[str | None, Any], Any, Any]]:
        """What has changed since: the dictionary's name and the key, and what was there before and after."""
        held = _held_by(module)
        for name in self.held | held:
            was, now = self.held.get(name, {}), held.get(name, {})
            for key in was | now:
                then, after = was.get(key, _ABSENT), now.get(key, _ABSENT)
                if then is not after and name is None:
                    then, after = _attribute(key, then), _attribute(key, after)
                if then is not after:
                    yield (name, key), then, after


def _attribute(key: str, value: Any) -> Any:
    """The value of an attribute that is compared; tensors, records and torch's dictionaries are not."""
    return _ABSENT if key in _REGISTERED or isinstance(value, _LEFT_OUT) else value


def _copied(known: Prepared | None) -> Prepared | None:
    if known is None:
        return None
    layers = known.forward and replace(known.forward, wraps=dict(known.forward.wraps))
    lists: dict[str, Any] = {key: [*getattr(known, key)] for key in ("averagings", "follow", "ends")}
    return replace(known, forward=layers, **lists)


@dataclass(slots=True)
class _ModuleChange:
    """What has become of one module."""

    kind: type[nn.Module]
    known: Prepared | None
    """Its class and record before."""
    now: type[nn.Module]
    values: dict[tuple[str | None, Any], tuple[Any, Any]] = field(default_factory=dict)
    """What was there before and after, by dictionary and key."""
    hooks: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """The keys of hooks that were not there before, by dictionary; FSDP2 adds one for each parameter."""

    def note(self, changes: Iterable[tuple[tuple[str | None, Any], Any, Any]]) -> None:
        """Add what `_ModuleThen.changes` finds, after what is noted."""
        known = {(name, key) for name, keys in self.hooks.items() for key in keys}
        added: dict[str, list[Any]] = {}
        for place, before, after in changes:
            name, key = place
            if place in self.values:
                self.values[place] = self.values[place][0], after
            elif name is None or name == "_modules" or (before is not _ABSENT and place not in known):
                self.values[place] = before, after
            elif place not in known:
                added.setdefault(name, []).append(key)
        for name, keys in added.items():
            self.hooks[name] = *self.hooks.get(name, ()), *keys


@dataclass
class Changes:
    """What one preparation has changed in the modules of a model."""

    modules: dict[nn.Module, _ModuleChange]
    cut: list[str]
    """The parameters that were DTensors before."""
    wrappers: dict[nn.Module, _ModuleThen] = field(default_factory=dict)
    """The modules that have replaced others since, as they were after the preparation."""

    def user_cuts(self) -> Iterator[str]:
        """Why the tensors cannot be restored."""
        if self.cut:
            yield (
                f"{listed(self.cut)} was a DTensor before the preparation, so it cannot be restored "
                "without the code that cut it. Build the model again and load a full_state_dict."
            )

    def faults(self) -> Iterator[str]:
        """Why they cannot be put back."""
        for module, one in self.modules.items():
            kind = one.kind.__name__
            if type(module) is not one.now:
                yield f"other code has changed the class of a {kind} to {type(module).__name__} since."
            _, ours = one.values.get((None, "forward"), (None, _ABSENT))
            if ours is not _ABSENT and vars(module).get("forward") is not ours:
                yield f"other code has set a forward on top of the prepared one of a {kind}; take it off."
            for (name, key), (_, wrapper) in one.values.items():
                if name != "_modules" or (then := self.wrappers.get(wrapper)) is None:
                    continue
                is_there = module._modules.get(key) is wrapper
                if not is_there:
                    yield f"other code has replaced, moved or removed {key} of a {kind}; put it back."
                elif others := sorted(_of_others(wrapper, then)):
                    yield (
                        f"other code has set {listed(others)} on {key} of a {kind}, which the preparation "
                        "has put in the place of another module; take it off."
                    )

    def put_back(self) -> None:
        """Restore the modules."""
        for module, one in self.modules.items():
            own = vars(module)
            _torch.forget_changes(module)
            if one.kind is not one.now:
                module.__class__ = one.kind
                _torch.forget_state(module)
            for (name, key), (before, after) in one.values.items():
                held = own if name is None else own[name]
                if held.get(key, _ABSENT) is not after:
                    continue
                if before is _ABSENT:
                    held.pop(key, None)
                else:
                    held[key] = before
            for name, keys in one.hooks.items():
                for key in keys:
                    own[name].pop(key, None)
            own.pop(RECORD, None)
            if one.known is not None:
                own[RECORD] = one.known


def _of_others(wrapper: nn.Module, then: _ModuleThen) -> Iterator[str]:
    """What other code has set on a wrapper since."""
    yield from wrapper._buffers
    for (name, key), _, now in then.changes(wrapper):
        if now is not _ABSENT:
            yield key if name is None else f"a hook ({name.strip('_')})"


@contextmanager
def changes_noted(model: nn.Module) -> Iterator[None]:
    """Note in the record of `model` what the body changes in its modules, after what is noted there."""
    before = {module: _ModuleThen.read(module) for module in model.modules()}
    known = of(model)
    first = known is None or known.changes is None
    cut = [name for name, p in model.named_parameters() if isinstance(p, DTensor)] if first else []
    yield
    known = record(model)
    if known.changes is None:
        known.changes = Changes({}, cut)
    noted = known.changes.modules
    for module, was in before.items():
        one = noted.get(module) or _ModuleChange(was.kind, was.known, type(module))
        one.now = type(module)
        one.note(was.changes(module))
        if one.values or one.hooks or one.kind is not one.now or of(module) is not None:
            noted[module] = one
    made = {one for one in model.modules() if one not in before}
    places = chain.from_iterable(one.values.items() for one in noted.values())
    stand_ins = made.intersection(now for (name, _), (_, now) in places if name == "_modules")
    for wrapper in {*known.changes.wrappers, *stand_ins}:
        known.changes.wrappers[wrapper] = _ModuleThen.read(wrapper)
