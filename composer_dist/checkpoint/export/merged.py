"""Merges adapters into the weights, a layer at a time, by peft's own arithmetic.

A layer with an adapter temporarily gets full copies of all its tensors. peft merges these in place, and then
the layer's own tensors and attributes are restored.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from composer_dist.distributed.moving.gather import gather
from composer_dist.errors import CheckpointValueError
from composer_dist.files.adapters import without_adapters
from composer_dist.structure.families import is_a, original_classes
from composer_dist.structure.names import ancestors, canonical_name
from composer_dist.structure.structure import read_structure
from composer_dist.tensors.inner import dense


@dataclass(frozen=True)
class AdaptedLayer:
    """A module around which peft has put adapters."""

    name: str
    module: Any

    def merged(self, wanted: bool = True) -> dict[str, Tensor]:
        """The layer's full tensors after merging, by plain name; a collective.

        Args:
            wanted: False only takes part in the gathering, and returns nothing.

        Raises:
            CheckpointValueError: peft cannot merge this kind of adapter.
        """
        with _full_copies(self.module), warnings.catch_warnings(), torch.no_grad():
            if not wanted:
                return {}
            warnings.simplefilter("ignore")  # peft's advice on how to load the merged model
            try:
                result = _merge(self.module)
            except Exception as error:  # peft has several for what it cannot merge
                raise CheckpointValueError(
                    f"peft cannot merge the adapter of {self.name}: {error}"
                ) from error
            state = result.state_dict().items()
            return {f"{self.name}.{canonical_name(key)}": value.detach() for key, value in state}


def merged_sources(base: nn.Module) -> tuple[dict[str, Tensor], dict[str, AdaptedLayer]]:
    """The `state_dict()` that a model would have if its active adapters were merged, by plain names.

    Args:
        base: the model with peft's layers.

    Returns:
        Name to the model's own tensor, of the right shape and dtype; and name to the layer to merge for its
        value.
    """
    structure = read_structure(base)
    plain = without_adapters(structure)
    layers = {name: AdaptedLayer(name, module) for name, module in _adapted(structure.modules)}
    tensors: dict[str, Tensor] = {}
    homes: dict[str, AdaptedLayer] = {}
    for key, tensor in base.state_dict(keep_vars=True).items():
        key = canonical_name(key)
        if key not in plain:
            continue  # the adapter's own
        name, copy = plain[key]
        host = next((one for one in ancestors(key) if one in layers), None)
        if host is None:
            tensors[name] = tensor
        elif (chosen := _chosen_copy(layers[host].module)) is not None:
            if key.startswith(f"{host}.{chosen}."):
                tensors[name] = tensor
        elif not copy:
            tensors[name] = tensor
            homes[name] = layers[host]
    return tensors, homes


def base_sources(base: nn.Module) -> dict[str, Tensor]:
    """The `state_dict()` that a model with peft's layers would have without them, by plain names."""
    plain = without_adapters(read_structure(base))
    state = {canonical_name(key): tensor for key, tensor in base.state_dict(keep_vars=True).items()}
    return {plain[key][0]: tensor for key, tensor in state.items() if key in plain and not plain[key][1]}


def check_mergeable(hosts: Mapping[str, Any]) -> None:
    """Raise unless the adapters can be merged into layers.

    Args:
        hosts: modules with a `peft_config`, by name.

    Raises:
        CheckpointValueError: prompt learning; or peft refuses, for GPTQ weights for example.
    """
    for name, host in hosts.items():
        prompts = [
            key
            for key, config in host.peft_config.items()
            if config.is_prompt_learning or config.is_adaption_prompt
        ]
        if prompts:
            raise CheckpointValueError(
                f"The adapters {', '.join(prompts)} of {name or 'the model'} learn prompts instead of "
                "weights and cannot be merged. Export them as adapters, without merge_adapters."
            )
        check = getattr(getattr(host, "base_model", None), "_check_merge_allowed", None)
        if check is not None:
            try:
                check()
            except ValueError as error:
                raise CheckpointValueError(str(error)) from error


def _adapted(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of each outermost peft layer."""
    found: set[str] = set()
    for name, module in modules.items():
        wraps = is_a(module, "BaseTunerLayer", "AuxiliaryTrainingWrapper")
        if wraps and found.isdisjoint(ancestors(name)):
            found.add(name)
            yield name, module


def _chosen_copy(layer: Any) -> str | None:
    """The part of a `modules_to_save` layer with the effective weights, unless they are adapted."""
    if not is_a(layer, "ModulesToSaveWrapper"):
        return None
    active = [name for name in layer.active_adapters if name in layer.modules_to_save]
    if not active:
        return "original_module"
    adapted = is_a(layer.modules_to_save[active[0]], "BaseTunerLayer")
    return None if adapted else f"modules_to_save.{active[0]}"


def _merge(layer: Any) -> nn.Module:
    """The module with which peft's `merge_and_unload` replaces a layer."""
    if hasattr(layer, "unload_and_optionally_merge_module"):
        unloaded: nn.Module = layer.unload_and_optionally_merge_module(
            merge=True, safe_merge=False, adapter_names=None
        )
        return unloaded
    layer.merge()
    base: nn.Module = layer.get_base_layer()
    return base


@contextmanager
def _full_copies(layer: nn.Module) -> Iterator[None]:
    """Inside, a layer has full copies of its tensors; afterwards everything in it is restored."""
    modules = list(layer.modules())
    attributes = [(module, dict(vars(module))) for module in modules]
    contents = [
        (value, value.copy())
        for _, held in attributes
        for value in held.values()
        if isinstance(value, dict | list | set)
    ]
    copies: dict[int, Tensor] = {}

    def copied(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            full = dense(gather(tensor))
            copies[id(tensor)] = nn.Parameter(full, False) if isinstance(tensor, nn.Parameter) else full
        return copies[id(tensor)]

    try:
        with original_classes(layer.modules()):
            for module in modules:
                for named in (module.named_parameters, module.named_buffers):
                    for key, tensor in list(named(recurse=False, remove_duplicate=False)):
                        setattr(module, key, copied(tensor))
            yield
    finally:
        for value, before in contents:
            value.clear()
            value.extend(before) if isinstance(value, list) else value.update(before)
        for module, held in attributes:
            vars(module).clear()
            vars(module).update(held)
