"""What a user hands over to be saved, by key: models, optimizers, stateful objects, plain values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from composer_dist.checkpoint.full_state import live_state
from composer_dist.checkpoint.kinds.optimizer import (
    check_whole,
    is_low_bit,
    named_optimizer_state,
    parameter_names,
)
from composer_dist.distributed.prepared import mesh_of
from composer_dist.errors import CheckpointError, CheckpointValueError
from composer_dist.files.manifest import Kind
from composer_dist.tensors.inner import as_floats, inner_tensors

Filter = Callable[[str, Any], bool]


Filters = Filter | Mapping[str, Filter] | None


def kind_of(value: Any) -> Kind:
    """What a value is saved as."""
    if isinstance(value, nn.Module):
        return "model"
    return "optimizer" if isinstance(value, Optimizer) else "value"


def keys_named(kinds: Sequence[Sequence[str]]) -> str:
    """Pairs of a key and the kind of its value, for the error of ranks that give different ones."""
    return (
        ", ".join(f"{key!r}" if kind == "value" else f"{key!r} ({kind})" for key, kind in kinds) or "nothing"
    )


def is_stateful(value: Any) -> bool:
    """Whether a value gives and takes its state itself, such as a scheduler."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def bare(model: nn.Module) -> nn.Module:
    """The module inside of a DDP that was wrapped around it."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def check_contents(state: Mapping[str, Any], model: nn.Module | None, filters: Filters) -> None:
    """Refuse what cannot be meant.

    Raises:
        CheckpointValueError: there is nothing to save, or no parallel model in a world of several ranks; a
            filter is for a key that does not exist, or is none.
    """
    if not isinstance(state, Mapping):
        raise CheckpointValueError(
            f"What is saved goes by keys, and is no {type(state).__name__}; "
            'save_checkpoint(path, {"model": model}).'
        )
    chosen = filters.values() if isinstance(filters, Mapping) else [] if filters is None else [filters]
    if odd := [one for one in chosen if not callable(one)]:
        raise CheckpointValueError(f"filter= takes functions (name, value) -> bool, not {odd[0]!r}.")
    if not state:
        raise CheckpointValueError("There is nothing to save: the state is empty.")
    if wrong := [key for key in state if not isinstance(key, str) or not key]:
        raise CheckpointValueError(f"The keys of a checkpoint are non-empty strings, not {wrong[0]!r}.")
    models = [value for value in state.values() if isinstance(value, nn.Module)]
    if not models and model is None:
        raise CheckpointValueError(
            'There is no model in the state; save {"model": model, ...}, or pass model= for a lone optimizer.'
        )
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world > 1 and not any(_is_parallel(one) for one in [*models, model] if one is not None):
        raise CheckpointValueError(
            f"None of the models is parallel, but there are {world} ranks, which may hold different values; "
            "prepare it with parallelize_model first."
        )
    if isinstance(filters, Mapping) and (unknown := [key for key in filters if key not in state]):
        raise CheckpointValueError(
            f"filter= has keys that the state lacks: {', '.join(unknown)}; it has {', '.join(state)}."
        )


def models_in(state: Mapping[str, Any], model: nn.Module | None) -> list[nn.Module]:
    """The models whose parameters an optimizer may hold."""
    found = [value for value in state.values() if isinstance(value, nn.Module)]
    return [bare(one) for one in ([model] if model is not None else found)]


def model_of(optimizer: Optimizer, models: list[nn.Module]) -> nn.Module:
    """The model that an optimizer trains.

    Raises:
        CheckpointValueError: it holds parameters of none, or of several.
    """
    if not models:
        raise CheckpointValueError(
            f"{type(optimizer).__name__} is saved by the names of its model's parameters; add the model to "
            "the state, or pass model=."
        )
    for number, model in enumerate(models):
        try:
            parameter_names(model, optimizer)
        except CheckpointError:
            if number == len(models) - 1:
                raise
        else:
            return model
    raise AssertionError


def extract(key: str, value: Any, models: list[nn.Module], filters: Filters, whole: bool = False) -> Any:
    """What is saved of a value: its own tensors by name, sharded as they are.

    Args:
        whole: keep a tensor with a codec in one piece, to be decoded; else its parts are saved.
    """
    if isinstance(value, nn.Module):
        found: Any = live_state(bare(value)) if whole else dict(_live(bare(value)))
        chosen = filters if callable(filters) else (filters or {}).get(key)
    elif isinstance(value, Optimizer):
        model = model_of(value, models)
        found = named_optimizer_state(model, value)
        check_whole(model, found["state"])
        if is_low_bit(value):  # what a rank has quantized by itself means nothing to others
            found["state"] = {
                name: {k: as_floats(v) if isinstance(v, Tensor) else v for k, v in values.items()}
                for name, values in found["state"].items()
            }
        chosen = None if callable(filters) else (filters or {}).get(key)
        if chosen is not None:
            state = {n: s for n, s in found["state"].items() if chosen(n, s)}
            return {**found, "state": state}
    else:
        found = value.state_dict() if is_stateful(value) else value
        chosen = None if callable(filters) else (filters or {}).get(key)
    if chosen is not None and isinstance(found, Mapping):
        found = {name: one for name, one in found.items() if chosen(name, one)}
    if isinstance(value, nn.Module) and not found:
        raise CheckpointValueError(f"Nothing of {key!r} is left to save: the filter takes no name of it.")
    return found


def _live(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """A model's own tensors by name; what a tensor with a codec is made of, in its place."""
    for name, value in live_state(model).items():
        inner = inner_tensors(value) if isinstance(value, Tensor) else {}
        if inner:
            yield from ((f"{name}.{part}", tensor) for part, tensor in inner.items())
        else:
            yield name, value


def _is_parallel(model: nn.Module) -> bool:
    return isinstance(model, DistributedDataParallel) or mesh_of(model) is not None
