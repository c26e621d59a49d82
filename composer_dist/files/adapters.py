"""peft's names for the tensors of the base model and of adapters.

peft wraps the model's layers (`q_proj` becomes `q_proj.base_layer` and `q_proj.lora_A.default`) and puts
the model into `base_model.model`. In a file the base model's tensors have their original names, and an
adapter's names lack the adapter's name.
"""

import json
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from torch import nn

from composer_dist import _torch
from composer_dist.errors import CheckpointValueError
from composer_dist.structure.families import is_a
from composer_dist.structure.names import canonical_name, child_name
from composer_dist.structure.structure import Structure
from composer_dist.tensors.blueprint import Blueprint


def without_adapters(structure: Structure) -> dict[str, tuple[str, bool]]:
    """Every name of a base tensor as it would be without peft's layers, except for a prefix of the model.

    Returns:
        Name to (plain name, whether this tensor is a copy that peft made to train it).
    """
    found: dict[str, tuple[str, bool]] = {}
    known: dict[str, tuple[str, bool] | None] = {"": ("", False)}
    for held in structure.tensors.values():
        for name, owner in zip(held.info.names, held.info.owners, strict=True):
            place = _plain(owner, structure.modules, known)
            step = place and _step(structure.modules[owner], name.rpartition(".")[2])
            if place is not None and step is not None:
                found[name] = (child_name(place[0], step) if step else place[0], place[1])
    return found


def base_models(structure: Structure) -> Iterator[tuple[str, nn.Module]]:
    """Plain-name prefix ("" or with a final dot) and module of each outermost transformers model."""
    for name, module in _outermost(structure, lambda module: is_a(module, "PeftModel", "PreTrainedModel")):
        if is_a(module, "PeftModel"):
            base = module.get_base_model()
            name = next(path for path, one in structure.modules.items() if one is base)
            yield f"{name}.", base
        else:
            yield f"{name}." if name else "", module


def adapter_entries(structure: Structure, directory: str) -> dict[str, str]:
    """The names of an adapter's tensors in its file, by peft's own rules.

    Args:
        directory: the name of the file's directory; peft gives an adapter that is not "default" its own.

    Returns:
        Name in the file to one of the tensor's names in the model; empty if there is no adapter.

    Raises:
        CheckpointValueError: it is unclear which adapter is meant, or peft computes the values to save.
    """
    hosts = _hosts(structure)
    if len(hosts) > 1:
        raise CheckpointValueError(
            f"Several modules have adapters: {', '.join(name or 'the model' for name, _ in hosts)}. Load "
            "them separately."
        )
    return {} if not hosts else _entries(*hosts[0], directory)


def changed_settings(structure: Structure, directory: Path) -> list[str]:
    """The settings that scale an adapter, where the model's is not scaled as the one in `directory`.

    Raises:
        CheckpointValueError: `adapter_config.json` is not JSON.
    """
    file, hosts = directory / "adapter_config.json", _hosts(structure)
    if len(hosts) != 1 or not file.is_file():
        return []
    ((_, host),) = hosts
    try:
        saved = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise CheckpointValueError(f"{file} is not JSON: {error}.") from None
    mine = host.peft_config[_adapter_of(host, directory.name)]
    both = [(key, saved[key], getattr(mine, key)) for key in _SCALES if key in saved and hasattr(mine, key)]
    return [
        f"{key}={one!r} (the model has {other!r})"
        for key, one, other in both
        if (one or None) != (other or None)
    ]


_SCALES = ("lora_alpha", "alpha", "alpha_pattern", "use_rslora", "scaling", "random_loc_seed")
"""Settings of an adapter that change what it computes, and no name or shape of its tensors."""


def check_base(structure: Structure, read: Collection[str], path: Path) -> list[str]:
    """Compare a model's adapters with the base weights that it is to read.

    Args:
        read: first names of the tensors that the checkpoint has.

    Returns:
        Tensors of adapters that were computed from the weights that are replaced.

    Raises:
        CheckpointValueError: an adapter has changed the weights, so that others do not fit it.
    """
    kept = [name for name in structure.tensors if name not in read]
    for _, host in _hosts(structure) if read else ():
        for adapter, config in host.peft_config.items():
            kind = getattr(config, "init_lora_weights", True)
            starts = any(f".lora_A.{adapter}." in name for name in kept)
            if starts and str(kind).lower().startswith(_CHANGING):
                raise CheckpointValueError(
                    f"The adapter {adapter!r} has changed the model's weights (init_lora_weights={kind!r}), "
                    f"so those of {path} do not fit it. Build the model with its weights (from_pretrained) "
                    "before the adapter, and load or pass none."
                )
    return [name for name in kept if _DERIVED.search(name)]


_CHANGING = ("corda", "loftq", "lora_ga", "olora", "pissa")
"""The `init_lora_weights` with which peft changes the weights below."""
_DERIVED = re.compile(r"\.(lora_magnitude_vector|trainable_tokens_delta)\.")
"""Tensors that peft computes from the weights below: DoRA's magnitudes, rows of an embedding."""


def _hosts(structure: Structure) -> list[tuple[str, Any]]:
    """The modules with adapters."""
    return list(
        _outermost(structure, lambda module: isinstance(getattr(module, "peft_config", None), Mapping))
    )


def _adapter_of(host: Any, directory: str) -> str:
    """The adapter that the files in a directory of this name are for."""
    adapters = list(host.peft_config)
    adapter = directory if directory in adapters else "default" if "default" in adapters else adapters[0]
    if len(adapters) > 1 and adapter not in (directory, "default"):
        raise CheckpointValueError(
            f"The model has no adapter {directory!r}, only {', '.join(adapters)}; peft saves each adapter in "
            "a directory of the same name."
        )
    return adapter


def _entries(name: str, host: Any, directory: str) -> dict[str, str]:
    from peft import get_peft_model_state_dict

    adapter = _adapter_of(host, directory)
    prefix = f"{name}." if name else ""
    if host.peft_config[adapter].is_prompt_learning:  # peft computes these from the prompt encoder
        return {"prompt_embeddings": f"{prefix}prompt_encoder.{adapter}.embedding.weight"}
    buffers = (
        (path, one)
        for path, one in host.named_buffers(remove_duplicate=False)
        if _torch.is_saved(host.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2])
    )
    tensors = chain(host.named_parameters(remove_duplicate=False), buffers)
    asked = {path: Blueprint.stored(canonical_name(path), tuple(t.shape), t.dtype) for path, t in tensors}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        taken = get_peft_model_state_dict(host, asked, adapter, save_embedding_layers=False)
    found = {}
    for key, value in taken.items():
        source = value.source if isinstance(value, Blueprint) else None
        if source is None:
            raise CheckpointValueError(f"peft computes {key} when saving; load it with peft.")
        found[canonical_name(key)] = f"{prefix}{source}"
    return found


def _outermost(structure: Structure, wanted: Callable[[nn.Module], bool]) -> Iterator[tuple[str, Any]]:
    """The modules of a kind that are in no other module of that kind."""
    inside: tuple[str, ...] = ()
    for name, module in structure.modules.items():
        if not f"{name}.".startswith(inside) and wanted(module):
            inside = (*inside, f"{name}." if name else "")
            yield name, module


def _plain(
    name: str, modules: Mapping[str, nn.Module], known: dict[str, tuple[str, bool] | None]
) -> tuple[str, bool] | None:
    """The plain name of a module and whether it is a copy; None within an adapter."""
    if name not in known:
        parent, _, key = name.rpartition(".")
        above = _plain(parent, modules, known)
        grand, _, middle = parent.rpartition(".")
        if above is None:
            known[name] = None
        elif middle == "modules_to_save" and is_a(modules.get(grand), "AuxiliaryTrainingWrapper"):
            known[name] = (above[0], True)
        else:
            step = _step(modules[parent], key)
            plain = child_name(above[0], step) if step else above[0]
            known[name] = None if step is None else (plain, above[1])
    return known[name]


def _step(module: nn.Module, key: str) -> str | None:
    """A child's part of the plain name: its key, "" below peft's layers, None for an adapter."""
    if is_a(module, "BaseTunerLayer") and "base_layer" in module._modules:
        return "" if key == "base_layer" else None
    if is_a(module, "AuxiliaryTrainingWrapper"):
        return "" if key in ("original_module", "modules_to_save", "token_adapter") else None
    foreign = (is_a(module, "PeftModel") and key != "base_model") or (
        is_a(module, "BaseTuner") and key != "model"
    )
    return None if foreign else key
