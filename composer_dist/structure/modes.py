"""Forwards that change nothing: training and evaluation mode, buffers."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from composer_dist.structure.structure import read_structure


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Afterwards every module is in its own mode again."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients inside; afterwards every module is in its own mode again."""
    with modes_kept(model), torch.no_grad():
        model.eval()
        yield


@contextmanager
def values_kept(model: nn.Module) -> Iterator[None]:
    """Afterwards buffers, tensors in attributes, and `training` flags are as before."""
    others = [held for held in read_structure(model).tensors.values() if held.info.kind != "parameter"]
    kept = [(held, held.get(), held.get().detach().clone()) for held in others]
    try:
        with modes_kept(model):
            yield
    finally:
        with torch.no_grad():
            for held, tensor, value in kept:
                if held.get() is not tensor:
                    held.put(tensor)
                if not tensor.is_meta and not torch.equal(tensor, value):
                    tensor.copy_(value)
