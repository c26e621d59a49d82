"""Checks that the ranks that share matrices do the same: each has a part of every product.

In the forwards 1, 2, 4, 8, ... of the model they compare its batch, whether they need gradients, and how
often optimizers have stepped. With different batches, they would silently train on meaningless numbers.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from composer_dist.distributed.prepared import record
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.distributed.training.changes import is_power_of_two
from composer_dist.errors import ParallelismRuntimeError
from composer_dist.tensors.fingerprint import fingerprint
from composer_dist.tensors.nested import tensors_in

_REMEDIES = {
    "batches": "Pass sampler_kwargs(mesh) to the sampler, and use the same seed on every rank.",
    "modes of gradients": "Run forward under torch.no_grad() on all of them, or on none.",
    "numbers of optimizer steps": "Call optimizer.step() on all of them, after the same batches.",
}


def compare_forwards(model: nn.Module, mesh: DeviceMesh) -> None:
    """Compare the forwards of `model` among the ranks of `mesh` from now on."""
    forwards = _Forwards(tuple(dist.get_process_group_ranks(mesh.get_group())))
    handle = model.register_forward_pre_hook(forwards, with_kwargs=True)
    record(model).ends.append(handle.remove)


@dataclass
class _Forwards:
    """A hook; it is at module level so that the model can be pickled."""

    ranks: tuple[int, ...]
    number: int = 0

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        batch = [one for one in tensors_in((args, kwargs)) if _has_values(one)]
        if not batch:
            return
        self.number += 1
        if is_power_of_two(self.number):
            mine = [[fingerprint(one) for one in batch], torch.is_grad_enabled(), record(model).steps]
            Agreement(self.ranks).reach("a forward of tensor parallelism", mine, self._compare)

    def _compare(self, findings: list[list[Any]]) -> None:
        for what, remedy, *values in zip(_REMEDIES, _REMEDIES.values(), *findings, strict=True):
            for rank, value in zip(self.ranks, values, strict=True):
                if value != values[0]:
                    raise ParallelismRuntimeError(
                        f"Ranks {self.ranks[0]} and {rank} share matrices (tensor parallelism) but have "
                        f"different {what}. {remedy}"
                    )


def _has_values(tensor: Tensor) -> bool:
    """Whether it is an ordinary tensor, not one of a trace."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_meta
