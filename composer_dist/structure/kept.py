"""What stays as it was: training and evaluation modes, buffers and other attributes, whatever runs inside."""

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
            # Its own `train` may do more than set flags: adapters are merged for evaluation.
            if module.training is not training and type(module).train is not nn.Module.train:
                module.train(training)
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
    """Afterwards buffers, other attributes and their containers, and `training` flags are as before."""
    others = [held for held in read_structure(model).tensors.values() if held.info.kind != "parameter"]
    kept = [(held, held.get(), held.get().detach().clone()) for held in others]
    attributes = [(vars(module), _own(vars(module))) for module in model.modules()]
    values = [value for _, own in attributes for value in own.values()]
    containers = [(one, copy.copy(one)) for one in values if type(one) in _CONTAINERS]
    try:
        with modes_kept(model):
            yield
    finally:
        for now, own in attributes:
            for key in _own(now).keys() - own.keys():
                del now[key]
            now.update(own)
        for container, before in containers:
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(before)
        with torch.no_grad():
            for held, tensor, value in kept:
                if held.get() is not tensor:
                    held.put(tensor)
                if not tensor.is_meta and not torch.equal(tensor, value):
                    tensor.copy_(value)


_CONTAINERS = dict, OrderedDict, defaultdict, list, set


def _own(attributes: dict[str, Any]) -> dict[str, Any]:
    """A module's attributes except hooks, parameters, modules and what torch.distributed keeps there."""
    names = [key for key in attributes if "_hooks" not in key and not key.startswith("__composable")]
    return {key: attributes[key] for key in names if key not in ("_parameters", "_modules")}
