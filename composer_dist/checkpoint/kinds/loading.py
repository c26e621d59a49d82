"""How each kind of thing is restored: what is checked before anything changes, and then what changes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composer_dist.checkpoint.format.opened import Opened
from composer_dist.checkpoint.full_optimizer import by_name
from composer_dist.checkpoint.full_state import foreign_tensors, live_state, owner_of
from composer_dist.checkpoint.kinds.contents import is_stateful
from composer_dist.checkpoint.kinds.optimizer import PreparedState, parameter_names, prepare_optimizer_state
from composer_dist.checkpoint.pretrained import fill_model
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.distributed.mesh.layout import Layout
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.distributed.ranks.process_group import device_of_group
from composer_dist.distributed.weights.disk import Pretrained, Target
from composer_dist.distributed.weights.storage import give_memory
from composer_dist.errors import CheckpointKeyError, CheckpointValueError
from composer_dist.files.match import Match, castable
from composer_dist.models.adapters import whole_state
from composer_dist.structure.names import canonical_name
from composer_dist.structure.structure import Structure, read_structure
from composer_dist.tensors.blueprint import Blueprint
from composer_dist.tensors.inner import codec_of, encode_into, inner_tensors, local_part


@dataclass
class Faults:
    """What does not fit, of all keys."""

    strict: bool
    ignore: Callable[[str], bool]
    """Whether nobody asks for a name."""
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misfits: list[str] = field(default_factory=list)

    def report(self, path: str) -> None:
        """Raise for all at once; where the user is lenient, warn of what is missing or unexpected.

        Raises:
            CheckpointValueError: shapes, dtypes or kinds that do not fit.
            CheckpointKeyError: `strict`, and something is missing or unexpected.
        """
        lists = (("missing", self.missing), ("unexpected", self.unexpected))
        odd = [f"{what}: {', '.join(names)}" for what, names in lists if names]
        if self.misfits or (odd and self.strict):
            text = ". ".join(
                odd + ([f"Of another kind or shape: {'; '.join(self.misfits)}"] if self.misfits else [])
            )
            if self.misfits:
                raise CheckpointValueError(f"{path} does not fit. {text}.")
            raise CheckpointKeyError(f"{path} does not fit. {text}. strict=False takes what fits.")
        if odd:
            warnings.warn(f"{path} was loaded in part. {'. '.join(odd)}.", UserWarning, stacklevel=4)


class Part(Protocol):
    """One key of the state, ready to be restored."""

    def prepare(self) -> None:
        """Make what values are read into; may raise, on this rank alone."""

    def load(self, agreement: Agreement) -> None:
        """Read, on all ranks together."""


@dataclass
class _Model:
    opened: Opened
    model: nn.Module
    structure: Structure
    blueprints: dict[str, Blueprint]
    """By first name."""
    inner: dict[str, tuple[str, str]]
    """Paths of what tensors with a codec consist of, to the tensor's first name and the part's."""
    objects: dict[str, Any]
    """Names of extra state to what is there, encoded."""

    def prepare(self) -> None:
        """Memory is made as it is filled."""

    def load(self, agreement: Agreement) -> None:
        fill_model(self.model, self.structure, reader_of(self.opened, self.blueprints, agreement))
        names = {name for name, _ in self.inner.values()}
        give_memory(self.structure, names, device_of_group())
        parts = {name: inner_tensors(self.structure.tensors[name].get()) for name in names}
        _fill(self.opened, {path: parts[name][part] for path, (name, part) in self.inner.items()}, agreement)
        with agreement.together("the extra state"):
            for name, code in self.objects.items():
                owner_of(self.model, name).set_extra_state(self.opened.value(code))


def plan_model(opened: Opened, key: str, model: nn.Module, faults: Faults) -> _Model:
    """Match by name: wrapper segments do not count, any name of a tied tensor does."""
    with whole_state(model):
        targets = live_state(model)
    if foreign := foreign_tensors(model, targets):
        raise foreign
    structure = read_structure(model)
    first = {name: one for one, held in structure.tensors.items() for name in held.info.names}
    inner = {
        f"{name}.{part}": (name, part, held)
        for name, target in targets.items()
        if isinstance(target, Tensor)
        for part, held in inner_tensors(target).items()
    }
    plan = _Model(opened, model, structure, {}, {}, {})
    present: set[int] = set()
    for name, code in _entries(opened, key, faults):
        own = canonical_name(name)
        target = targets.get(own)
        path = code.get("tensor")
        if own in inner and path:
            whole, part, held = inner[own]
            plan.inner[path] = first[whole], part
            present.add(id(targets[whole]))
            if fault := _misfit(opened.tensors[path], held, exactly=True):
                faults.misfits.append(f"{key}.{name} is {fault}")
        elif own not in targets:
            if first.get(own) is None:  # else a buffer that is not saved any more
                faults.unexpected.append(f"{key}.{name}")
        elif isinstance(target, Tensor) and path:
            present.add(id(target))
            plan.blueprints[first[own]] = opened.tensors[path]
            if fault := _misfit(opened.tensors[path], target):
                faults.misfits.append(f"{key}.{name} is {fault}")
        elif isinstance(target, Tensor):
            faults.misfits.append(f"{key}.{name} is no tensor there")
        else:
            present.add(id(target))
            plan.objects[own] = code
    read = set(plan.inner.values())
    begun = {whole for whole, _ in read}
    faults.misfits += [
        f"{key}.{own} is not there, though other parts of {whole} are"
        for own, (whole, part, _) in inner.items()
        if first[whole] in begun and (first[whole], part) not in read
    ]
    expected = {name: targets[name] for name in live_state(model)}
    faults.missing += [
        f"{key}.{name}"
        for name, target in expected.items()
        if not faults.ignore(f"{key}.{name}")
        and (id(target) not in present if isinstance(target, Tensor) else name not in plan.objects)
    ]
    return plan


def _misfit(stored: Blueprint, target: Tensor, exactly: bool = False) -> str | None:
    """How a stored tensor differs from the one that it is for, if it does; `exactly`: may not be cast."""
    if tuple(stored.shape) != tuple(target.shape):
        return f"{tuple(stored.shape)} there, {tuple(target.shape)} here"
    if stored.dtype != target.dtype and (exactly or not castable(stored.dtype, target.dtype)):
        return f"{stored.dtype} there, {target.dtype} here"
    return None


def _entries(opened: Opened, key: str, faults: Faults) -> Iterator[tuple[str, Any]]:
    """Names below a key to what is there, encoded."""
    ((tag, pairs),) = opened.structure[key].items()
    if tag not in ("dict", "ordered"):
        faults.misfits.append(f"{key} is no model's state there")
        return
    yield from (pair for pair in pairs if not faults.ignore(f"{key}.{pair[0]}"))


@dataclass
class _Optimizer:
    opened: Opened
    optimizer: Optimizer
    model: nn.Module
    described: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]] | None
    paths: dict[int, str]
    """The path of each tensor in `described`, by identity."""
    prepared: PreparedState | None = None

    def prepare(self) -> None:
        self.prepared = prepare_optimizer_state(self.model, self.optimizer, self.described, self.groups)

    def load(self, agreement: Agreement) -> None:
        assert self.prepared is not None
        made = self.prepared.values
        with agreement.together("the optimizer's state"):
            self.prepared.install()
        tensors = {
            self.paths[id(value)]: made[name][key]
            for name, values in self.described.items()
            for key, value in values.items()
            if isinstance(value, Tensor)
        }
        _fill(self.opened, tensors, agreement)


def plan_optimizer(
    opened: Opened, key: str, optimizer: Optimizer, model: nn.Module, faults: Faults
) -> _Optimizer:
    """Match by the names of parameters; numbers are places in the optimizer's groups."""
    paths: dict[int, str] = {}
    state, groups = by_name(opened.described(opened.structure[key], paths), model, optimizer)
    names = parameter_names(model, optimizer)
    held = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    known = dict.fromkeys([*state, *(name for group in groups or () for name in group["params"])])
    wanted = [name for name in held if not faults.ignore(f"{key}.{name}")]
    faults.missing += [f"{key}.{name}" for name in wanted if name not in known]
    faults.unexpected += [f"{key}.{name}" for name in known if name not in held]
    described = {name: state.get(name, {}) for name in wanted if name in known}
    for group in groups or ():  # a learning rate may be a tensor
        group.update({option: opened.read(value, paths) for option, value in group.items()})
    return _Optimizer(opened, optimizer, model, described, groups, paths)


@dataclass
class _Value:
    opened: Opened
    key: str
    state: MutableMapping[str, Any]
    value: Any = None

    def prepare(self) -> None:
        """Read it, on this rank alone; shards that are there are filled later, and stay."""
        self.targets: dict[str, Tensor] = {}
        now = self.state[self.key]
        code = self.opened.structure[self.key]
        self.value = None if is_stateful(now) else self._read(code, now)

    def load(self, agreement: Agreement) -> None:
        _fill(self.opened, self.targets, agreement)
        now = self.state[self.key]
        if is_stateful(now):
            with agreement.together(f"restoring {self.key}"):
                now.load_state_dict(self.opened.value(self.opened.structure[self.key]))
        else:
            self.state[self.key] = self.value

    def _read(self, code: Any, now: Any) -> Any:
        ((tag, inner),) = code.items()
        if tag == "tensor" and isinstance(now, DTensor):
            self.targets[inner] = now
            return now
        if tag == "dict" and isinstance(now, Mapping):
            return {key: self._read(one, now.get(key)) for key, one in inner}
        return self.opened.value(code)


def plan_value(opened: Opened, key: str, state: MutableMapping[str, Any]) -> _Value:
    """Anything that is no model and no optimizer."""
    return _Value(opened, key, state)


def _fill(opened: Opened, tensors: Mapping[str, Tensor], agreement: Agreement) -> None:
    """Read tensors, sharded or not, in place; on all ranks together."""
    targets, later = [], []
    for path, tensor in tensors.items():
        local = local_part(tensor)
        direct = codec_of(local) is None and local.is_contiguous()
        dtype = tensor.dtype if codec_of(local) is None else torch.float32
        memory = local if direct else torch.empty(local.shape, dtype=dtype, device=local.device)
        mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
        targets.append(Target(path, Layout.of(tensor), memory, mesh))
        if memory is not local:
            later.append((local, memory))
    if targets:
        reader_of(opened, opened.tensors, agreement).fill(targets, ParallelismConfig().bucket_bytes)
    for local, memory in later:
        encode_into(local, memory)


def reader_of(opened: Opened, blueprints: dict[str, Blueprint], agreement: Agreement) -> Pretrained:
    """What reads slices of tensors, called as in `blueprints`."""
    return Pretrained(opened.index, opened.root, Match(tensors=blueprints), agreement)
