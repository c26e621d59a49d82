"""Finds what initializers touch by running them on the meta device."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from composer_dist import _torch
from composer_dist.distributed.weights.draw import Operation
from composer_dist.errors import ParallelismValueError
from composer_dist.random_states import set_aside, states_outside_torch
from composer_dist.structure.names import ancestors
from composer_dist.structure.structure import Structure


@dataclass
class Initializer:
    """One call that gives values to tensors."""

    module: str
    """The name of the module it is for, which seeds it."""
    label: str
    run: Callable[[], Any]
    touches: frozenset[str] = frozenset()
    """Names of the tensors that it writes or reads, once traced."""
    writes: frozenset[str] = frozenset()
    program: tuple[Operation, ...] | None = None
    """All that it does, if these are only operations on each element separately."""


def trace(
    structure: Structure, initializers: list[Initializer], watched: bool = False
) -> Mapping[str, float]:
    """Run the initializers on meta copies and record what they do; the model is not changed.

    Args:
        watched: find out which of them draw from Python's or NumPy's generators. Done if any does.

    Returns:
        How many operations write into each tensor, by name; infinity if that is unknown.
    """
    before = {name: [p.get() for p in held.places] for name, held in structure.tensors.items()}
    below: dict[str, list[str]] = {}
    for name, held in structure.tensors.items():
        for owner in held.info.owners:
            for above in ancestors(owner):
                below.setdefault(above, []).append(name)
    kept: list[torch.Tensor] = []  # alive to the end, so that no other storage takes their address
    try:
        for held in structure.tensors.values():
            shadow = torch.empty(held.info.shape, dtype=held.info.dtype, device="meta")
            kept.append(shadow)
            is_parameter = held.info.kind == "parameter"
            held.put(nn.Parameter(shadow, held.info.requires_grad) if is_parameter else shadow)
        recorder = _Recorder(
            {_torch.storage_key(held.get()): name for name, held in structure.tensors.items()}
        )
        with set_aside(), torch.no_grad(), _torch.all_initializers_write():
            drawn = _other_states()
            for initializer in initializers:
                mine = below.get(initializer.module, [])
                recorder.start()
                try:
                    with recorder, _Escapes(recorder), torch.device("meta"):
                        initializer.run()
                except Exception as error:
                    if not (recorder.lacked_values or isinstance(error, NotImplementedError)):
                        raise
                    recorder.writes.update(mine)  # it looks at values, so it may do anything to its own
                    recorder.counts.update(dict.fromkeys(mine, inf))
                    recorder.program = None
                for name in mine:
                    now = structure.tensors[name].get()
                    key = _torch.storage_key(now)
                    if recorder.names.get(key) != name:  # rebound to another tensor or storage
                        recorder.writes.add(name)
                        recorder.counts[name] = inf
                        recorder.program = None
                        recorder.names[key] = name
                        kept.append(now)
                _check_ties(structure, mine, initializer)
                initializer.writes = frozenset(recorder.writes)
                initializer.touches = frozenset(recorder.writes | recorder.reads)
                if watched and drawn != (drawn := _other_states()):
                    recorder.program = None
                initializer.program = None if recorder.program is None else tuple(recorder.program)
            again = not watched and drawn != _other_states()
    finally:
        for name, held in structure.tensors.items():
            for place, old in zip(held.places, before[name], strict=True):
                place.put(old)
    return trace(structure, initializers, watched=True) if again else recorder.counts


def _other_states() -> tuple[Any, ...]:
    """Of Python's and NumPy's generators."""
    states = states_outside_torch()
    kind, keys, *rest = states.get("numpy", ("", b""))
    return states["python"], kind, bytes(keys), rest


def _check_ties(structure: Structure, names: list[str], initializer: Initializer) -> None:
    """Refuse an initializer that breaks a tie."""
    for name in names:
        held = structure.tensors[name]
        if len({id(place.get()) for place in held.places}) > 1:
            raise ParallelismValueError(
                f"The {initializer.label} of {initializer.module or 'the root'} puts a new tensor in one "
                f"place of {' = '.join(held.info.names)}, which are tied. Let it write into the one there."
            )


class _Recorder(_torch.TorchDispatchMode):
    """Records which tensors of a model operations write and read, by their storage."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = names
        self.counts: dict[str, float] = defaultdict(int)
        """How often each tensor was written."""
        self.start()

    def start(self) -> None:
        """Clear the record."""
        self.writes: set[str] = set()
        self.reads: set[str] = set()
        self.lacked_values = False
        """Whether an operation failed because tensors on the meta device have no values."""
        self.program: list[Operation] | None = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = _torch.arguments(func)
        values = [*args, *(kwargs[a.name] for a in schema[len(args) :] if a.name in kwargs)]
        declared = [*schema[: len(args)], *(a for a in schema[len(args) :] if a.name in kwargs)]
        view = any(a.alias_info is not None and not a.alias_info.is_write for a in declared)
        first = schema[0].alias_info if schema else None
        writes_first = first is not None and first.is_write
        draws = torch.Tag.nondeterministic_seeded in func.tags
        devices, touched = set(), None
        for argument, value in zip(declared, values, strict=True):
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if not isinstance(tensor, torch.Tensor):
                    continue
                devices.add(tensor.device.type)
                if (writes or not view) and (name := self.names.get(_torch.storage_key(tensor))) is not None:
                    (self.writes if writes else self.reads).add(name)
                    self.counts[name] += writes
                    touched = touched or name
        if touched or draws:
            self._add(Operation.of(func, touched, args, kwargs) if touched and writes_first else None)
        if draws and writes_first and devices == {"meta"}:
            return args[0]  # normal_ and its kin write only; their meta kernels are slow
        try:
            return func(*args, **kwargs)
        except Exception as error:
            needs_values = torch.Tag.data_dependent_output in func.tags or len(devices) > 1
            self.lacked_values |= needs_values or isinstance(error, NotImplementedError)
            raise

    def take(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Record a function that fills its first argument and is not an operation."""
        name = self.names.get(_torch.storage_key(args[0]))
        if name:
            self.writes.add(name)
            self.counts[name] = inf
        self._add(Operation.of(func, name, args, kwargs) if name else None)
        return args[0]

    def _add(self, one: Operation | None) -> None:
        self.program = None if one is None or self.program is None else [*self.program, one]


class _Escapes(TorchFunctionMode):
    """Records what is not an operation: `trunc_normal_`, and failed reads of a meta tensor's values."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _torch.trunc_normal_:
            return self.recorder.take(func, args, kwargs or {})
        try:
            return func(*args, **(kwargs or {}))
        except TypeError:
            escapes = getattr(func, "__wrapped__", func) in _ESCAPES  # `watch_data` wraps numpy
            self.recorder.lacked_values |= escapes and args[0].is_meta
            raise


_ESCAPES = (torch.Tensor.numpy, torch.Tensor.__index__, torch.Tensor.__format__)
