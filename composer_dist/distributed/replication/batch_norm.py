"""Batch norms that take their statistics over all ranks, and back; in place.

Torch's conversion builds new modules: hooks, attributes and references to the old modules are lost, and it
cannot be undone. Both kinds of module have the same tensors and differ only in their class and one
attribute, so only those are changed.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from composer_dist.distributed import prepared
from composer_dist.errors import ParallelismTypeError

_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class BatchNorm(nn.BatchNorm1d):
    """For inputs of any number of dimensions: what a SyncBatchNorm of unknown origin becomes."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        pass


def convert_sync_batch_norm(model: nn.Module, group: dist.ProcessGroup | None = None) -> list[str]:
    """Make every batch norm of `model`, itself included, a `torch.nn.SyncBatchNorm`.

    The modules stay the same objects, with their tensors, hooks, attributes and mode. They run on
    accelerators only.

    Args:
        group: the ranks whose batches count together; None is all.

    Returns:
        The names of the modules.

    Raises:
        ParallelismTypeError: a subclass with a forward of its own, which would be lost; nothing is changed.
    """
    found = dict(find_batch_norms(model))
    own = [
        f"{name or 'the root'} ({type(module).__name__})"
        for name, module in found.items()
        if type(module).forward is not nn.BatchNorm1d.forward
    ]
    if own:
        raise ParallelismTypeError(
            f"{', '.join(own)} would lose the forward of its class as a SyncBatchNorm; leave it out of the "
            "model, or let its class inherit BatchNorm's forward."
        )
    for module in found.values():
        prepared.record(module).original_class = type(module)
        module.__class__ = nn.SyncBatchNorm
        vars(module)["process_group"] = group
    return list(found)


def revert_sync_batch_norm(model: nn.Module) -> list[str]:
    """Give every SyncBatchNorm of `model`, itself included, the class that it had before.

    One that `convert_sync_batch_norm` has not made becomes a batch norm for any number of dimensions.

    Returns:
        The names of the modules.
    """
    found = {name: m for name, m in model.named_modules() if isinstance(m, nn.SyncBatchNorm)}
    for module in found.values():
        known = prepared.record(module)
        module.__class__ = known.original_class or BatchNorm  # type: ignore[assignment]
        known.original_class = None
        prepared.tidy(module)
        del module.process_group
    return list(found)


def find_batch_norms(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of every batch norm that is not synchronized."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, _KINDS))
