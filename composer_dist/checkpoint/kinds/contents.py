"""Checks the state that a user saves or restores, and finds the kind of each value."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from composer_dist.checkpoint.format.opened import Opened
from composer_dist.checkpoint.kinds import model, optimizer, value
from composer_dist.checkpoint.kinds.kind import Chosen, ContentKind
from composer_dist.checkpoint.kinds.model import bare
from composer_dist.distributed.prepared import mesh_of
from composer_dist.errors import CheckpointValueError
from composer_dist.files.checkpoint_format import Kind

Filters = Chosen | Mapping[str, Chosen] | None

KINDS: Mapping[Kind, ContentKind] = {"model": model, "optimizer": optimizer, "value": value}
"""In the order in which `owns` is asked; "value" owns everything else."""


def kind_of(content: Any) -> Kind:
    """The kind of a value."""
    return next(name for name, kind in KINDS.items() if kind.owns(content))


def stored_kind(opened: Opened, key: str) -> Kind:
    """The kind of a key in a checkpoint: as recorded, or guessed."""
    if key in opened.kinds:
        return opened.kinds[key]
    found = next(name for name, kind in KINDS.items() if kind.guess(opened.structure[key]))
    beside = key != "model" and "model" in opened.structure and model.guess(opened.structure["model"])
    return "value" if found == "model" and beside else found  # tensors by name need not be a model


def extract(key: str, content: Any, models: list[nn.Module], filters: Filters, whole: bool) -> Any:
    """The part of a value to save; a single filter applies to the models."""
    name = kind_of(content)
    chosen = filters.get(key) if isinstance(filters, Mapping) else filters if name == "model" else None
    return KINDS[name].extract(key, content, models, chosen, whole)


def kinds_in(state: Mapping[str, Any]) -> list[list[str]]:
    """Each key and the kind of its value."""
    return [[key, kind_of(content)] for key, content in state.items()]


def check_same_call(verb: str, posts: Sequence[Sequence[Any]]) -> None:
    """Raise unless all ranks post the same options and `kinds_in` of their state; paths may differ."""

    def spell(post: Sequence[Any]) -> str:
        keys = (f"{key!r}" if kind == "value" else f"{key!r} ({kind})" for key, kind in post[2])
        options = (f"{name}={value}" for name, value in post[1].items())
        return f"{', '.join(keys) or 'nothing'} with {', '.join(options)}"

    for rank, post in enumerate(posts):
        if post[1:] != posts[0][1:]:
            raise CheckpointValueError(
                f"Ranks 0 and {rank} {verb} differently: {spell(posts[0])} and {spell(post)}. Every rank "
                "must pass the same keys and options."
            )


def check_contents(state: Mapping[str, Any], model: nn.Module | None, filters: Filters) -> None:
    """Refuse what `save_checkpoint` cannot save."""
    if not isinstance(state, Mapping):
        raise CheckpointValueError(
            f"The state to save must be a mapping, not a {type(state).__name__}: "
            'save_checkpoint(path, {"model": model}).'
        )
    chosen = filters.values() if isinstance(filters, Mapping) else [] if filters is None else [filters]
    if odd := [one for one in chosen if not callable(one)]:
        raise CheckpointValueError(f"filter must be a function (name, value) -> bool, not {odd[0]!r}.")
    if not state:
        raise CheckpointValueError("There is nothing to save: the state is empty.")
    if wrong := [key for key in state if not isinstance(key, str) or not key]:
        raise CheckpointValueError(f"The keys of a checkpoint must be non-empty strings, not {wrong[0]!r}.")
    models = [value for value in state.values() if isinstance(value, nn.Module)]
    if not models and model is None:
        raise CheckpointValueError(
            'The state has no model; save {"model": model, ...}, or pass model= to save only an optimizer.'
        )
    world = dist.get_world_size() if dist.is_initialized() else 1
    every = [one for one in [*models, model] if one is not None]
    if world > 1 and not any(isinstance(m, DistributedDataParallel) or mesh_of(m) for m in every):
        raise CheckpointValueError(
            f"None of the models is parallel, but there are {world} ranks, which may hold different values; "
            "prepare it with parallelize_model first."
        )
    if isinstance(filters, Mapping) and (unknown := [key for key in filters if key not in state]):
        raise CheckpointValueError(
            f"filter has keys that the state lacks: {', '.join(unknown)}; it has {', '.join(state)}."
        )


def models_in(state: Mapping[str, Any], model: nn.Module | None) -> list[nn.Module]:
    """The models whose parameters an optimizer may hold."""
    found = [value for value in state.values() if isinstance(value, nn.Module)]
    return [bare(one) for one in ([model] if model is not None else found)]
