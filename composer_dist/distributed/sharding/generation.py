"""Transformers' `generate` of a sharded model, whose forwards all ranks run together."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from composer_dist.distributed.ranks.process_group import gather_objects
from composer_dist.errors import ParallelismValueError
from composer_dist.structure.families import transformers_models


def check_generation(model: nn.Module) -> None:
    """Have `generate` of the transformers models in `model` refuse static caches that end before others."""
    for owner in transformers_models(model):
        if callable(getattr(owner, "generate", None)):
            owner.generate = partial(_generate, owner.generate)


def _generate(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    check_static_cache(getattr(method, "__self__", None), args, kwargs)
    return method(*args, **kwargs)


def check_static_cache(owner: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Compare the arguments of a transformers model's `generate` on all ranks; a collective.

    Raises:
        ParallelismValueError: with a static cache, ranks that may take different numbers of steps.
    """
    settings = kwargs.get("generation_config") or getattr(owner, "generation_config", None)
    names = ("cache_implementation", "max_new_tokens", "max_length")
    kind, new, length = (kwargs.get(name, getattr(settings, name, None)) for name in names)
    prompts = (*args[:1], kwargs.get("inputs"), kwargs.get("input_ids"))
    size = next((one.shape[1] for one in prompts if one is not None), None)
    found = gather_objects((kind, new or (length, size)))
    if any("static" in (one or "") for one, _ in found) and len(set(found)) > 1:
        raise ParallelismValueError(
            "generate: a static cache ends on a rank while others still generate. Pass "
            f"the same max_new_tokens on all ranks, and no max_length; they have {found}."
        )
