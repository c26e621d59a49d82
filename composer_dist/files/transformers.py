"""Converts between the names and fused tensors of checkpoints and of transformers models.

transformers renames and rearranges the tensors that it loads by tables (`conversion_mapping.py`, one per
architecture, which users can extend). They are applied here as `from_pretrained` applies them
(`core_model_loading.convert_and_load_state_dict_in_model`), but to blueprints instead of tensors.
"""

import re
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, NamedTuple

import torch

from composer_dist.errors import CheckpointValueError
from composer_dist.structure.families import original_classes
from composer_dist.tensors.blueprint import Blueprint

_MOVED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Buffers that were once saved elsewhere (`PreTrainedModel._adjust_missing_and_unexpected_keys`)."""


class Converted(NamedTuple):
    """A checkpoint's tensors as the model has them."""

    tensors: dict[str, tuple[Blueprint, tuple[str, ...]]]
    """Name in the model to a blueprint, and the checkpoint's names of the tensors in it."""
    left: dict[str, str]
    """Names in the checkpoint that the model does not have, to what they were renamed to."""


def convert(model: Any, given: Mapping[str, Blueprint], shapes: dict[str, tuple[int, ...]]) -> Converted:
    """Apply the tables for a transformers model.

    Args:
        given: the checkpoint's tensors by name.
        shapes: of the tensors in the model's `state_dict`, by names without peft's layers.

    Raises:
        CheckpointValueError: conversions compute values, or fail; all of them are listed.
    """
    from transformers import conversion_mapping
    from transformers import core_model_loading as loading

    unread = getattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", ()) is None
    if unread and _as_in_model(given, shapes):
        return Converted({name: (value, (name,)) for name, value in given.items()}, {})
    with original_classes(model.modules()):
        table = conversion_mapping.get_model_conversion_mapping(model)
    renamings = [one for one in table if isinstance(one, loading.WeightRenaming)]
    converters = [one for one in table if isinstance(one, loading.WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    prefix = model.base_model_prefix
    tensors: dict[str, tuple[Blueprint, tuple[str, ...]]] = {}
    pending: dict[str, tuple[Any, list[str]]] = {}
    left: dict[str, str] = {}
    for key in sorted(given, key=loading.dot_natural_key):
        name, pattern = loading.rename_source_key(key, renamings, converters, prefix, shapes)
        if name not in shapes and key in shapes:
            name, pattern = loading.rename_source_key(key, [], [], prefix, shapes)
        if name not in shapes:
            left[key] = name
        elif pattern is None:
            tensors.setdefault(name, (given[key], (key,)))
        else:
            converter, keys = pending.setdefault(name, (deepcopy(by_pattern[pattern]), []))
            converter.add_tensor(name, key, pattern, given[key])
            keys.append(key)
    faults = []
    for name, (converter, keys) in pending.items():
        try:
            made = converter.convert(name, model=_Shapes(model, shapes), config=model.config)
            for target, value in made.items():
                tensors[target] = (value[0] if isinstance(value, list) else value), tuple(keys)
        except Exception as error:  # an operation of transformers may raise anything
            steps = ", ".join(type(operation).__name__ for operation in converter.operations)
            faults.append(f"{name} from {keys[0]}{' and others' if len(keys) > 1 else ''} ({steps}): {error}")
    if faults:
        raise CheckpointValueError(
            f"transformers converts these tensors, but not in slices: {'; '.join(faults)}. Check that the "
            "checkpoint is complete, or convert it once with from_pretrained and save_pretrained."
        )
    return Converted(tensors, left)


def _as_in_model(given: Mapping[str, Blueprint], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether nothing needs to be converted, which saves making the tables: 0.1 s for a thousand patterns.

    Conversions that keep all names and shapes are known for experts in square blocks alone, of three
    dimensions; others may be registered by users, but the tables have been made then.
    """
    return given.keys() == shapes.keys() and all(
        value.dims == shapes[name] and len(shapes[name]) < 3 for name, value in given.items()
    )


def is_ignored(model: Any, names: tuple[str, ...], what: str) -> bool:
    """Whether the model lists one of these names as one that may be "missing" or "unexpected"."""
    patterns = set(getattr(model, f"_keys_to_ignore_on_load_{what}", None) or ())
    if what == "unexpected" and hasattr(model, "base_model_prefix"):
        buffers = [name for name, _ in model.named_buffers()]
        patterns.update(one for one in _MOVED if any(re.search(one, name) for name in buffers))
    return any(re.search(pattern, name) for pattern in patterns for name in names)


class _Shapes:
    """A model for conversions, which ask for the shapes of its parameters."""

    def __init__(self, model: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._model, self._shapes = model, shapes

    def get_parameter(self, name: str) -> Blueprint:
        """A blueprint of the parameter's shape."""
        return Blueprint.stored(name, self._shapes[name], torch.float32)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def revert(model: Any, state: dict[str, Any]) -> dict[str, Any]:
    """The tensors that `save_pretrained` makes from `state`, tensors or stand-ins without ties."""
    from transformers.core_model_loading import revert_weight_conversion

    with original_classes(model.modules()):
        made: dict[str, Any] = revert_weight_conversion(model, state)
    return made


def ties(model: Any) -> list[tuple[Any, str, str]]:
    """The ties that transformers makes when it loads: two names, and the configuration that says so."""
    found = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        if hasattr(module, "get_expanded_tied_weights_keys"):
            try:
                pairs = module.get_expanded_tied_weights_keys()
            except ValueError:  # its patterns do not match the names inside of peft's layers
                pairs = module.all_tied_weights_keys
            inside = f"{prefix}." if prefix else ""
            found += [(module.config, inside + one, inside + other) for one, other in pairs.items()]
    return found


def untied(model: Any, state: Mapping[str, Any], same: Mapping[str, object]) -> dict[str, Any]:
    """`state` with only one name of each tensor that transformers ties when it loads, as it saves a model.

    Args:
        same: name to the object that the model holds under it. Where names that transformers would tie have
            different ones, its configuration must not tie, and all names are kept.
    """
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    cells = {name: torch.zeros(()) for name in state if name not in ignored}
    wrong = set(map(id, untying(model, same)))
    for config, one, other in ties(model):
        if id(config) not in wrong and one in cells and other in cells:
            before = cells[one]
            cells |= {name: cells[other] for name, cell in cells.items() if cell is before}
    substitutes = {name: cell.expand(tuple(state[name].shape)) for name, cell in cells.items()}
    kept = remove_tied_weights_from_state_dict(substitutes, model)
    return {name: state[name] for name in state if name in kept}


def untying(model: Any, same: Mapping[str, object]) -> list[Any]:
    """The configurations that ask for a tie that the stored tensors do not have; `same` as in `untied`."""
    return [
        config
        for config, one, other in ties(model)
        if one in same and other in same and same[one] is not same[other]
    ]
