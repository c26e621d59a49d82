"""Buffers that forward changes, such as a batch norm's running statistics, are rank 0's on every rank.

FSDP2 leaves buffers alone, so each rank would keep statistics of its own data: evaluation would differ from
rank to rank, and a checkpoint would hold those of one rank. DDP broadcasts rank 0's before each forward.
Here only buffers that a forward for training has changed are broadcast, before the next forward.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from composer_dist.distributed.training.changes import Before, Watch
from composer_dist.structure.structure import Structure


class FollowBuffers:
    """Hooks on the root.

    Args:
        mesh: the ranks that train on different data.
    """

    def __init__(self, structure: Structure, mesh: DeviceMesh) -> None:
        self._held = {name: held for name, held in structure.tensors.items() if held.info.kind == "buffer"}
        self._groups = [mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]
        self._changing: list[str] | None = None
        """What some rank's first forward for training has changed."""
        self._before: Before[str] | None = None
        self._stale = False
        if self._groups and self._held:
            structure.modules[""].register_forward_pre_hook(torch.compiler.disable(self._enter))
            structure.modules[""].register_forward_hook(torch.compiler.disable(self._leave))

    def _enter(self, root: nn.Module, args: Any) -> None:
        if self._stale:
            self._follow()
        if self._changing is None and root.training and torch.is_grad_enabled():
            self._before = Watch().before(root, self._buffers())

    def _leave(self, root: nn.Module, args: Any, output: Any) -> None:
        if not root.training or not torch.is_grad_enabled():
            return
        if self._changing is None and self._before is not None:
            found = set(self._before.changed(self._buffers()))
            for group in self._groups:
                everywhere: list[Any] = [None] * dist.get_world_size(group)
                dist.all_gather_object(everywhere, found, group=group)
                found = set().union(*everywhere)
            self._changing = sorted(found)
        self._stale = bool(self._changing)

    def _buffers(self) -> dict[str, Tensor]:
        return {name: held.get() for name, held in self._held.items()}

    @torch.no_grad()
    def _follow(self) -> None:
        self._stale = False
        buffers = self._buffers()
        for name in self._changing or ():
            for group in self._groups:
                dist.broadcast(buffers[name], group_src=0, group=group)
