"""Activations whose sequence is split among the ranks."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from composer_dist import _torch
from composer_dist.distributed.context_parallelism.attention import SequenceSplit
from composer_dist.distributed.context_parallelism.batch import Splitter
from composer_dist.distributed.mesh.mesh import Mesh


@dataclass
class Sequences:
    """Gathers activations whose sequence is split among the ranks."""

    cp: DeviceMesh | None
    tp: DeviceMesh | None
    split: SequenceSplit | None
    """How context parallelism divides the sequence."""

    @classmethod
    def of(cls, model: nn.Module, batch: Any, mesh: Mesh | None) -> "Sequences":
        """For a prepared model and the batch that it has got."""
        cp, tp = (mesh.cp, mesh.tp) if mesh is not None else (None, None)
        if cp is None:
            return cls(None, tp, None)
        return cls(cp, tp, Splitter(model).layout(batch, cp.size(), cp.get_local_rank()))

    @torch.no_grad()
    def value(self, part: Tensor, shape: torch.Size) -> Tensor | None:
        """The tensor of this shape of which `part` is this rank's; None if it is not one."""
        tp, cp = self.tp.size() if self.tp else 1, self.cp.size() if self.cp else 1
        ratios = [
            (dim, size // mine)
            for dim, (size, mine) in enumerate(zip(shape, part.shape, strict=False))
            if size != mine
        ]
        if part.ndim != len(shape) or len(ratios) > 1:
            return None
        if not ratios:
            return part
        dim, times = ratios[0]
        if part.shape[dim] * times != shape[dim] or times not in (tp, cp, tp * cp):
            return None
        if self.tp is not None and times != cp:
            part = torch.cat([*_gathered(part, self.tp)], dim)
        if self.cp is not None and self.split is not None and times in (cp, tp * cp):
            each = _gathered(part, self.cp)
            positions = [self.split.positions(part.device, rank) for rank in range(cp)]
            part = torch.cat([*each], dim).index_select(dim, torch.cat(positions).argsort())
        return part

    @torch.no_grad()
    def output(self, part: Tensor, shape: torch.Size) -> Tensor | None:
        """As `value`; a number is the mean of the ranks' of a sequence, as losses are."""
        if part.ndim or self.cp is None:
            return self.value(part, shape)
        return _gathered(part, self.cp).mean(0)

    @torch.no_grad()
    def gradient(self, part: Tensor, shape: torch.Size) -> Tensor | None:
        """As `value`; the ranks of a sequence have the gradients of the sum of their losses."""
        whole = self.value(part, shape)
        if whole is None or self.cp is None:
            return whole
        if part.shape == shape:
            whole = _gathered(whole, self.cp).sum(0)
        return whole / self.cp.size()


def _gathered(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """The ranks' tensors, in a new first dimension."""
    joined = tensor.new_empty(mesh.size() * tensor.numel())
    _torch.all_gather_single(joined, tensor.contiguous().flatten(), group=mesh.get_group())
    return joined.view(mesh.size(), *tensor.shape)
