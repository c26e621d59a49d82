"""Buffers that forward changes, such as a batch norm's running statistics, are rank 0's on every rank.

FSDP2 leaves buffers alone, so each rank would keep statistics of its own data: evaluation would differ from
rank to rank, and a checkpoint would hold those of one rank. DDP broadcasts rank 0's before each forward.
Here only those of batch norms in training, and those that were seen to change in a forward for training or
after it, are broadcast, before the next forward. The ranks look at all buffers after the forwards 1, 2, 4,
8, ...
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from composer_dist import _torch
from composer_dist.distributed.training.changes import Before, Watch, is_power_of_two
from composer_dist.structure.structure import Structure


class FollowBuffers:
    """Hooks on the root.

    Args:
        mesh: the ranks that train on different data.
    """

    def __init__(self, structure: Structure, mesh: DeviceMesh) -> None:
        self._held = {name: held for name, held in structure.tensors.items() if held.info.kind == "buffer"}
        self._groups = [mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]
        self._norms = {
            name: place.module
            for name, held in self._held.items()
            for place in held.places
            if isinstance(place.module, _torch.AnyBatchNorm)
        }
        self._forwards = 0
        """For training, so far."""
        self._changing: set[str] = set()
        """What has changed on some rank in a forward for training, or after it."""
        self._before: Before[str] | None = None
        self._due: list[str] = []
        if self._groups and self._held:
            structure.modules[""].register_forward_pre_hook(torch.compiler.disable(self._enter))
            structure.modules[""].register_forward_hook(torch.compiler.disable(self._leave))

    def _enter(self, root: nn.Module, args: Any) -> None:
        if self._before is not None:
            self._due = sorted({*self._due, *self._agree_on(self._before)})
            self._before = None
        if self._due:
            self._follow()
        if root.training and torch.is_grad_enabled():
            self._forwards += 1
            if is_power_of_two(self._forwards):
                self._before = Watch().before(root, self._buffers())

    def _agree_on(self, before: Before[str]) -> set[str]:
        """What has changed since on any rank, in the forward or after it."""
        found = set(before.changed(self._buffers()))
        for group in self._groups:
            everywhere: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(everywhere, found, group=group)
            found = set().union(*everywhere)
        self._changing |= found
        return found

    def _leave(self, root: nn.Module, args: Any, output: Any) -> None:
        if root.training and torch.is_grad_enabled():
            norms = (name for name, norm in self._norms.items() if norm.training)
            self._due = sorted(self._changing.union(norms))

    def _buffers(self) -> dict[str, Tensor]:
        return {name: held.get() for name, held in self._held.items()}

    @torch.no_grad()
    def _follow(self) -> None:
        buffers = self._buffers()
        for name in self._due:
            for group in self._groups:
                dist.broadcast(buffers[name], group_src=0, group=group)
        self._due = []
