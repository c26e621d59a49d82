"""What initializers touch, found by running them on the meta device; and the random state around them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule

from composer_dist import _torch
from composer_dist.structure.names import ancestors
from composer_dist.structure.structure import Structure


@contextmanager
def as_constructed(structure: Structure) -> Iterator[None]:
    """Sharded modules have their own classes again: initializers may look at a class's name."""
    swapped: dict[nn.Module, type[nn.Module]] = {
        module: type(module) for module in structure.modules.values() if isinstance(module, FSDPModule)
    }
    try:
        for module, cls in swapped.items():
            module.__class__ = _torch.original_class(cls)
        yield
    finally:
        for module, cls in swapped.items():
            module.__class__ = cls


def architecture_of(structure: Structure, name: str) -> str | None:
    """The innermost transformers model that contains all places of the module called `name`, if any."""
    transformers = sys.modules.get("transformers.modeling_utils")
    module = structure.modules[name]
    names = [other for other, known in structure.modules.items() if known is module]
    for above in ancestors(name):
        inside = all(above in ancestors(other) for other in names) and above not in names
        if transformers and inside and isinstance(structure.modules[above], transformers.PreTrainedModel):
            return type(structure.modules[above]).__name__
    return None


@contextmanager
def original_classes(model: nn.Module) -> Iterator[None]:
    """Inside, modules have the classes that the user gave them, without FSDP2's or DDP's in front.

    transformers and peft look tables up by class names, and write them into configurations.
    """
    prepared: list[tuple[nn.Module, type[nn.Module]]] = [
        (module, type(module))
        for module in model.modules()
        if isinstance(module, FSDPModule) or _torch.is_replicated(module)
    ]
    for module, cls in prepared:
        module.__class__ = _torch.original_class(cls)
    try:
        yield
    finally:
        for module, cls in prepared:
            module.__class__ = cls
