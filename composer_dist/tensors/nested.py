"""The tensors in nested data: batches, and the outputs of modules."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor


def tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """The tensors in a module's output, including those in mappings and dataclasses."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_in(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from tensors_in(value)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from tensors_in(getattr(output, field.name))


def named_tensors(batch: Any) -> list[tuple[str, Tensor]]:
    """The tensors that `map_tensors` would replace, with their names."""
    found: list[tuple[str, Tensor]] = []

    def note(name: str, tensor: Tensor) -> Tensor:
        found.append((name, tensor))
        return tensor

    map_tensors(note, batch)
    return found


def map_tensors(fn: Callable[[str, Tensor], Tensor], batch: Any, name: str = "") -> Any:
    """A copy of a batch with `fn(name, tensor)` in place of each tensor."""
    if isinstance(batch, Tensor):
        return fn(name, batch)
    if isinstance(batch, Mapping):
        # A copy keeps the class: a BatchEncoding, say.
        mapped: Any = copy.copy(batch) if isinstance(batch, MutableMapping) else dict(batch)
        for key, value in batch.items():
            mapped[key] = map_tensors(fn, value, _inside(name, key))
        return mapped
    if isinstance(batch, (tuple, list)):
        items = [map_tensors(fn, one, _inside(name, index)) for index, one in enumerate(batch)]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        keys = [field.name for field in dataclasses.fields(batch) if field.init]
        values = {key: map_tensors(fn, getattr(batch, key), _inside(name, key)) for key in keys}
        return dataclasses.replace(batch, **values)
    return batch


def _inside(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)
