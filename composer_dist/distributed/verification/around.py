"""Keeps everything as it was around a forward and backward that only look."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from composer_dist.random_states import seed_all, set_aside
from composer_dist.structure.kept import values_kept
from composer_dist.structure.structure import read_structure


@contextmanager
def as_before(model: nn.Module) -> Iterator[None]:
    """Restore gradients, buffers, tensors in attributes, and `training` flags at the end.

    Inside, no parameter has a gradient at first.
    """
    parameters = [held.get() for held in read_structure(model).parameters.values()]
    gradients = [(one, one.grad, one.grad.clone()) for one in parameters if one.grad is not None]
    for one in parameters:
        one.grad = None
    try:
        with values_kept(model):
            yield
    finally:
        with torch.no_grad():
            for one in parameters:
                one.grad = None
            for one, gradient, before in gradients:
                one.grad = gradient
                gradient.copy_(before)


@contextmanager
def seeded() -> Iterator[None]:
    """Inside, random numbers are the same each time; all generators are restored at the end."""
    with set_aside(torch.accelerator.current_accelerator(check_available=True)):
        seed_all(0)
        yield
