"""Buffers that forward changes, such as a batch norm's running statistics, are rank 0's on every rank.

FSDP2 leaves buffers alone, so each rank would keep statistics of its own data: evaluation would differ from
rank to rank, and a checkpoint would hold those of one rank. DDP broadcasts rank 0's before each forward.
Here only those of batch norms in training, and those that have changed on some rank in a forward for
training or after it, are broadcast, before the next forward. Each such forward begins by asking all ranks,
with one number, whether one of them has seen another buffer change: `Watch` says which changes it finds.
Buffers that forward makes in another size on each rank (a rotary table for the longest sequence so far) are
left to the ranks, after a warning.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from composer_dist import _torch
from composer_dist.distributed.prepared import record
from composer_dist.distributed.training.average_gradients import anywhere, groups_of
from composer_dist.distributed.training.changes import Before, Watch
from composer_dist.errors import ParallelismRuntimeError
from composer_dist.structure.structure import Structure
from composer_dist.tensors.parts import as_bytes
from composer_dist.users_code import warn
from composer_dist.wording import listed

_Kind: TypeAlias = tuple[torch.Size, torch.dtype]


class FollowBuffers:
    """Hooks on the root.

    Args:
        mesh: the ranks that train on different data.
    """

    def __init__(self, structure: Structure, mesh: DeviceMesh) -> None:
        self._root = structure.modules[""]
        self._groups = groups_of(mesh)
        self._norms = {
            f"{name}.{key}".removeprefix("."): module
            for name, module in self._root.named_modules()
            if isinstance(module, _torch.AnyBatchNorm)
            for key in vars(module)["_buffers"]
        }
        self._watch = Watch()
        self._changing: set[str] = set()
        """What has changed on some rank in a forward for training, or after it."""
        self._kinds: dict[str, _Kind | None] = {}
        """The shapes and dtypes of the changing buffers, which were the same on all ranks."""
        self._own: set[str] = set()
        """Buffers whose shapes or dtypes have differed from rank to rank: each rank keeps its own."""
        self._before: Before[str] | None = None
        """The other buffers as the last forward for training found them."""
        self._tensors: dict[str, Tensor] = {}
        """What they were then."""
        self._trained = False
        """Whether the last forward was for training."""
        self._cut: set[str] = set()
        """Tables that context parallelism cuts, so that each rank has its own part."""
        self._due: list[str] = []
        if self._groups:
            self._root.register_forward_pre_hook(torch.compiler.disable(self._enter))
            self._root.register_forward_hook(torch.compiler.disable(self._leave))
            record(self._root).follow.append(lambda: self._catch_up(True, dict(self._root.named_buffers())))

    def _enter(self, root: nn.Module, args: Any) -> None:
        trains = root.training and torch.is_grad_enabled()
        buffers = dict(root.named_buffers())  # walks all modules, which takes time
        self._catch_up(trains or self._trained, buffers)
        self._trained = trains
        if trains:
            self._tensors = self._others(buffers)
            self._before = self._watch.before(root, self._tensors)

    def _catch_up(self, looks: bool, buffers: Mapping[str, Tensor]) -> None:
        """Give every rank rank 0's values; `looks` for changes of further buffers."""
        if tables := set(map(id, record(self._root).tables)):
            self._cut.update(name for name, one in buffers.items() if id(one) in tables)
        others = self._others(buffers)
        if self._before is not None and (others or self._changing) and looks:
            same = {name: one for name, one in others.items() if self._tensors.get(name) is one}
            changed = others.keys() - same.keys() | set(self._before.changed(same))
            known = self._changing & buffers.keys()
            changed |= {name for name in known if _kind(buffers[name]) != self._kinds[name]}
            if any(anywhere([bool(changed)], self._groups)):
                self._due = sorted({*self._due, *self._agree_on(changed)} - self._own)
        if self._due:
            self._follow()

    def _others(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The buffers that are not followed yet, also those that a forward has made."""
        norms = {name for name, norm in self._norms.items() if norm.training}
        known = self._changing | norms | self._cut | self._own
        return {name: one for name, one in buffers.items() if name not in known}

    def _agree_on(self, changed: set[str]) -> set[str]:
        """What has changed on any rank.

        A buffer that has several shapes or dtypes is each rank's own from now on.

        Raises:
            ParallelismRuntimeError: some ranks have no such buffer.
        """
        here: dict[str, _Kind | None] = {name: _kind(one) for name, one in self._root.named_buffers()}
        for group in self._groups:
            everywhere: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(everywhere, (changed, here), group=group)
            changed = set().union(*(one for one, _ in everywhere))
            all_kinds = [one for _, one in everywhere]
            common = set.intersection(*map(set, all_kinds))
            here = {name: _common([one[name] for one in all_kinds]) for name in common}
        if missing := sorted(changed - here.keys()):
            raise ParallelismRuntimeError(
                f"{listed(missing)}: a forward has made this buffer on some ranks only, so it cannot follow "
                "rank 0's. Register buffers when the model is built."
            )
        if own := sorted(name for name in changed if here[name] is None):
            self._own.update(own)
            warn(
                f"{listed(own)}: a forward has made this buffer in another shape or dtype on some ranks, so "
                "it does not follow rank 0's any more; each rank keeps its own."
            )
        self._changing = (self._changing | changed) - self._own
        self._kinds.update({name: here[name] for name in changed})
        return changed

    def _leave(self, root: nn.Module, args: Any, output: Any) -> None:
        if root.training and torch.is_grad_enabled():
            norms = (name for name, norm in self._norms.items() if norm.training)
            self._due = sorted(self._changing.union(norms) - self._cut)

    @torch.no_grad()
    def _follow(self) -> None:
        buffers = dict(self._root.named_buffers(remove_duplicate=False))
        for name in self._due:
            sent = buffers[name].contiguous()
            for group in self._groups:
                # As bytes: gloo and NCCL do not know all dtypes.
                dist.broadcast(as_bytes(sent.view(-1)), group_src=0, group=group)
            if sent is not buffers[name]:
                buffers[name].copy_(sent)
        self._due = []


def _kind(buffer: Tensor) -> _Kind:
    return buffer.shape, buffer.dtype


def _common(kinds: Sequence[_Kind | None]) -> _Kind | None:
    """What the ranks have in common; None if they differ."""
    return kinds[0] if all(one == kinds[0] for one in kinds) else None
