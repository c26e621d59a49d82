"""Models in checkpoints, by the names in the plain model's `state_dict()`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from composer_dist.checkpoint.format.opened import Opened
from composer_dist.checkpoint.kinds.filling import fill_model, fill_tensors, reader_of
from composer_dist.checkpoint.kinds.kind import Chosen, Restore
from composer_dist.distributed.prepared import check_usable, reshard
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.distributed.ranks.process_group import device_of_group, world_and_rank
from composer_dist.distributed.weights.storage import give_memory
from composer_dist.errors import CheckpointValueError
from composer_dist.files.match import castable
from composer_dist.files.same import are_alike, are_stored_once
from composer_dist.models.adapters import whole_state
from composer_dist.structure.names import canonical_name
from composer_dist.structure.structure import Structure, read_structure
from composer_dist.tensors.blueprint import Blueprint
from composer_dist.tensors.inner import inner_tensors
from composer_dist.wording import listed


def owns(value: Any) -> bool:
    """Whether it is a module."""
    return isinstance(value, nn.Module)


def extract(key: str, value: Any, models: list[nn.Module], chosen: Chosen | None, whole: bool) -> Any:
    """Its `state_dict()`: the model's own tensors, or the inner tensors of those with a codec."""
    state = live_state(bare(value))
    if foreign := foreign_tensors(bare(value), state):  # else only loading would find out
        raise foreign
    found = state if whole else dict(_in_parts(state))
    if chosen is not None:
        found = {name: one for name, one in found.items() if chosen(name, one)}
    if not found:
        raise CheckpointValueError(
            f"There is nothing to save in {key!r}: the filter selects none of its names."
        )
    return found


def guess(code: Any) -> bool:
    """Whether it is a mapping of tensors only, except for extra state."""
    pairs = code.get("dict", code.get("ordered")) or ()
    own = [one for name, one in pairs if not str(name).endswith("_extra_state")]
    return bool(own) and all("tensor" in one for one in own)


@dataclass
class _ModelLoading:
    opened: Opened
    model: nn.Module
    structure: Structure
    blueprints: dict[str, Blueprint]
    """By first name."""
    inner: dict[str, tuple[str, str]]
    """Paths of inner tensors, to the first name of the tensor and the name of the inner one."""
    objects: dict[str, Any]
    """Names of extra state to the encoded values."""

    def prepare(self) -> None:
        """Nothing: `load` makes the memory."""

    def load(self, agreement: Agreement) -> None:
        fill_model(self.model, self.structure, reader_of(self.opened, self.blueprints, agreement))
        names = {name for name, _ in self.inner.values()}
        give_memory(self.structure, names, device_of_group())
        parts = {name: inner_tensors(self.structure.tensors[name].get()) for name in names}
        fill_tensors(
            self.opened, {path: parts[name][part] for path, (name, part) in self.inner.items()}, agreement
        )
        with agreement.together("the extra state"):
            for name, code in self.objects.items():
                owner_of(self.model, name).set_extra_state(self.opened.value(code))


def plan(restore: Restore, key: str) -> _ModelLoading:
    """Match by name, without wrapper segments, and by any name of a tied tensor.

    Raises:
        CheckpointValueError: the model's `state_dict` returns foreign tensors, or the checkpoint has
            different values for a tied tensor.
    """
    opened, mismatch, model = restore.opened, restore.mismatch, bare(restore.state[key])
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
    found = _ModelLoading(opened, model, structure, {}, {}, {})
    present: set[int] = set()
    paths: dict[str, str] = {}
    for name, code in _entries(restore, key):
        own = canonical_name(name)
        target = targets.get(own)
        path = code.get("tensor")
        if own in inner and path:
            whole, part, held = inner[own]
            found.inner[path] = first[whole], part
            present.add(id(targets[whole]))
            if fault := _misfit(opened.tensors[path], held, exactly=True):
                mismatch.misfits.append(f"{key}.{name} is {fault}")
        elif own not in targets:
            if first.get(own) is None:  # else a buffer that is no longer saved
                mismatch.unexpected.append(f"{key}.{name}")
        elif isinstance(target, Tensor) and path:
            present.add(id(target))
            found.blueprints[first[own]] = opened.tensors[path]
            if fault := _misfit(opened.tensors[path], target):
                mismatch.misfits.append(f"{key}.{name} is {fault}")
            else:
                _check_twin(opened, first[own], paths.setdefault(first[own], path), path)
        elif isinstance(target, Tensor):
            mismatch.misfits.append(f"{key}.{name} is not a tensor in the checkpoint")
        else:
            present.add(id(target))
            found.objects[own] = code
    read = set(found.inner.values())
    begun = {whole for whole, _ in read}
    mismatch.misfits += [
        f"{key}.{own} is not in the checkpoint, but other parts of {whole} are"
        for own, (whole, part, _) in inner.items()
        if first[whole] in begun and (first[whole], part) not in read
    ]
    expected = {name: targets[name] for name in live_state(model)}
    mismatch.missing += [
        f"{key}.{name}"
        for name, target in expected.items()
        if not restore.ignore(f"{key}.{name}")
        and (id(target) not in present if isinstance(target, Tensor) else name not in found.objects)
    ]
    return found


def live_state(model: nn.Module) -> dict[str, Any]:
    """Canonical names to the model's own tensors (the shards) and extra state."""
    check_usable(model)
    reshard(model)
    return {canonical_name(name): value for name, value in model.state_dict(keep_vars=True).items()}


def foreign_tensors(model: nn.Module, targets: Mapping[str, Any]) -> CheckpointValueError | None:
    """An error if the model's `state_dict` returns tensors that it does not hold, or under other names."""
    held: dict[int, set[str]] = {}
    tensors = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    for name, tensor in chain(*tensors):
        held.setdefault(id(tensor), set()).add(canonical_name(name))
    shown = {name: value for name, value in targets.items() if isinstance(value, Tensor)}
    foreign = [name for name, value in shown.items() if name not in held.get(id(value), ())]
    if not foreign:
        return None
    return CheckpointValueError(
        "A state-dict hook or an overridden method returns tensors that the model does not hold, or not "
        f"under these names, so they could not be loaded: {listed(foreign, 10)}. Use model.state_dict() and "
        "model.load_state_dict."
    )


def owner_of(model: nn.Module, name: str) -> Any:
    """The module whose extra state is called `name`."""
    owner = name.rpartition(".")[0]
    every = model.named_modules(remove_duplicate=False)
    *_, found = (module for path, module in every if canonical_name(path) == owner)  # wrappers come first
    return found


def bare(model: nn.Module) -> nn.Module:
    """The model without a DistributedDataParallel around it."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def _in_parts(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """A model's own tensors by name, with inner tensors in place of tensors with a codec."""
    for name, value in state.items():
        inner = inner_tensors(value) if isinstance(value, Tensor) else {}
        if inner:
            yield from ((f"{name}.{part}", tensor) for part, tensor in inner.items())
        else:
            yield name, value


def _misfit(stored: Blueprint, target: Tensor, exactly: bool = False) -> str | None:
    """Why a stored tensor cannot be loaded into its target, if it cannot; `exactly`: without a cast."""
    if tuple(stored.shape) != tuple(target.shape):
        return f"{tuple(stored.shape)} in the checkpoint, {tuple(target.shape)} in the model"
    if stored.dtype != target.dtype and (exactly or not castable(stored.dtype, target.dtype)):
        return f"{stored.dtype} in the checkpoint, {target.dtype} in the model"
    return None


def _check_twin(opened: Opened, name: str, one: str, other: str) -> None:
    """Raise a CheckpointValueError if two stored tensors for one tied tensor differ in this rank's share."""
    both = opened.tensors[one], opened.tensors[other]
    if are_stored_once(*both, opened.index.entries):
        return
    with opened.files() as files:
        world, rank = world_and_rank()
        alike = are_alike(*both, opened.index.entries, files, (rank, world))
    if not alike:
        raise CheckpointValueError(
            f"{one} and {other} differ in {opened.where}, but the model ties them as {name}. Untie them "
            "(tie_word_embeddings=False), or ignore the wrong one: load_checkpoint(ignore=...)."
        )


def _entries(restore: Restore, key: str) -> Iterator[tuple[str, Any]]:
    """Names below a key, and the encoded values."""
    ((tag, pairs),) = restore.opened.structure[key].items()
    if tag not in ("dict", "ordered"):
        restore.mismatch.misfits.append(f"{key} is not a model's state in the checkpoint")
        return
    yield from (pair for pair in pairs if not restore.ignore(f"{key}.{pair[0]}"))
