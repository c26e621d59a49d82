"""Finds the tensors that belong to an adapter, by peft's own rules.

peft's `get_peft_model_state_dict` chooses them by adapter names, `modules_to_save`, biases, resized
embeddings and method. It is called with stand-ins first, to find which tensors must be gathered, and
once more with the gathered tensors to write a file.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from composer_dist.errors import CheckpointValueError
from composer_dist.structure.names import canonical_name

State = dict[str, Tensor]


def adapter_hosts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of every outermost module that has adapters, `PeftModel` or not."""
    if _adapters(model):
        yield "", model
        return
    for name, child in model.named_children():
        for below, host in adapter_hosts(child):
            yield f"{name}.{below}" if below else name, host


def adapter_keys(model: nn.Module) -> set[str]:
    """The names, as in `model.state_dict()`, of all adapter tensors below `model`.

    Raises:
        CheckpointValueError: there are no adapters, or one of them has no tensors.
    """
    keys: set[str] = set()
    empty: list[str] = []
    hosts = list(adapter_hosts(model))
    for name, host in hosts:
        for adapter in _adapters(host):
            chosen = _chosen(host, adapter)
            if not chosen:
                empty.append(f"{adapter!r} of {name or 'the model'}")
            keys.update(canonical_name(f"{name}.{key}" if name else key) for key in chosen)
    if not hosts:
        raise CheckpointValueError("The model has no adapters: none of its modules has a peft_config.")
    if empty:
        raise CheckpointValueError(
            f"These adapters have no tensors: {', '.join(empty)}. Check the target_modules in their "
            "configuration."
        )
    return keys


def frozen_base(model: nn.Module) -> Callable[[str], bool]:
    """Whether a name in a checkpoint is of a frozen tensor below an adapter, which is loaded anew.

    Frozen adapters are not: another phase of the training may have trained them.
    """
    if not _adapters(model):
        return lambda name: False
    named = model.named_parameters(remove_duplicate=False)
    frozen = {canonical_name(name) for name, parameter in named if not parameter.requires_grad}
    frozen -= adapter_keys(model)
    return lambda name: name in frozen or name.rpartition(".")[0] in frozen  # a part of a quantized one


@contextmanager
def whole_state(model: nn.Module) -> Iterator[None]:
    """Inside, `state_dict()` of every `HuggingFaceModel` below `model` includes the frozen base."""
    filtered = [module for module in model.modules() if getattr(module, "should_save_peft_only", False)]
    for module in filtered:
        module.should_save_peft_only = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in filtered:
            module.should_save_peft_only = True  # type: ignore[assignment]


def as_peft_names(host: nn.Module, state: Mapping[str, Tensor]) -> State:
    """`state` by the names that peft looks up, which contain the segments of checkpoint wrappers."""
    names = {name: canonical_name(name) for name, _ in _tensors(host)}
    return {name: state[clean] for name, clean in names.items() if clean in state}


def _adapters(module: nn.Module) -> list[str]:
    """The names of the adapters of `module`."""
    configs = getattr(module, "peft_config", None)
    return list(configs) if isinstance(configs, Mapping) else []


def _tensors(host: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers under all their names, with wrapper segments."""
    yield from host.named_parameters(remove_duplicate=False)
    yield from host.named_buffers(remove_duplicate=False)


def _chosen(host: nn.Module, adapter: str) -> set[str]:
    """The names that peft would take for one adapter."""
    from peft import get_peft_model_state_dict

    if host.peft_config[adapter].is_prompt_learning:  # type: ignore[index, union-attr]
        # peft reads these from the prompt encoder, not from the given state.
        prefix = f"prompt_encoder.{adapter}."
        return {name for name, _ in _tensors(host) if name.startswith(prefix)}
    asked = {name: _StandIn.of(name, tensor) for name, tensor in _tensors(host)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft repeats the warnings when the file is written
        taken = get_peft_model_state_dict(host, state_dict=asked, adapter_name=adapter)
    return set(_sources(taken.values()))


class _StandIn(Tensor):
    """Zeros of a given shape, without memory, that remember which names they come from."""

    sources: frozenset[str]

    @classmethod
    def of(cls, name: str, like: Tensor) -> _StandIn:
        """The stand-in for the tensor `like` called `name`."""
        value = torch.zeros((), dtype=like.dtype).expand(like.shape).as_subclass(cls)
        value.sources = frozenset({name})
        return value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Keep the names in values computed from stand-ins (AdaLoRA's ranks, VB-LoRA's top k)."""
        untyped: Any = super()  # torch 2.13 has no types for it
        result = untyped.__torch_function__(func, types, args, kwargs or {})
        sources = frozenset(_sources([*args, *(kwargs or {}).values()]))
        for each in result if isinstance(result, tuple) else (result,):
            if isinstance(each, cls):
                each.sources = sources
        return result


def _sources(operands: Iterable[Any]) -> Iterator[str]:
    for operand in operands:
        if isinstance(operand, (list, tuple)):
            yield from _sources(operand)
        else:
            yield from getattr(operand, "sources", ())
