"""Post-local SGD: after a while ranks step by themselves, and their parameters are averaged now and then.

Lin, Stich, Patel and Jaggi: Don't Use Large Mini-Batches, Use Local SGD (2018), arXiv:1808.07217.
"""

# No deferred annotations: DDP compares a hook's with the types themselves.

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.optim import Optimizer

from composer_dist.distributed.averaging import average
from composer_dist.errors import ParallelismValueError


class LocalSGD:
    """The state of the hook; `after_step` belongs behind every optimizer's step.

    Args:
        group: all ranks that hold the model.
        averaging_period: local steps between two averages of the parameters.
        start_localSGD_iter: synchronised backward passes before the first local one.
        group_size: ranks that go on averaging their gradients in each local step; it divides the world
            size. None is the ranks of one host, as the launcher counts them.
        post_local_gradient_allreduce: False lets every rank step by itself.

    Raises:
        ParallelismValueError: `group_size` does not divide the ranks.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        averaging_period: int,
        start_localSGD_iter: int = 0,  # noqa: N803 (torch's name)
        group_size: int | None = None,
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        world = dist.get_world_size(group)
        size = int(os.environ.get("LOCAL_WORLD_SIZE", world)) if group_size is None else group_size
        size = size if post_local_gradient_allreduce else 1
        if size < 1 or world % size:
            raise ParallelismValueError(f"group_size={size} does not divide the {world} ranks.")
        self.everybody = group
        self.period = averaging_period
        self.left = start_localSGD_iter
        self.steps = 0
        """Local steps so far."""
        self._near, _ = (group, []) if size == world else dist.new_subgroups(group_size=size)

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks whose gradients are averaged at present."""
        return self._near if self.steps else self.everybody

    def next_backward(self) -> None:
        """Count a synchronised backward pass."""
        if self.left:
            self.left -= 1
        else:
            self.steps += 1

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Average what `optimizer` moves, if a period is over; registered as its post-step hook."""
        if self.steps and self.steps % self.period == 0:
            average((p for group in optimizer.param_groups for p in group["params"]), self.everybody)


def post_local_sgd(state: LocalSGD, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """DDP's communication hook: the mean over all ranks, later over those nearby."""
    if bucket.index() == 0:
        state.next_backward()
    gradients, group = bucket.buffer(), state.group
    if group.size() == 1:
        future: Future[Tensor] = torch.futures.Future()
        future.set_result(gradients)
        return future
    work: Any = dist.all_reduce(gradients.div_(group.size()), group=group, async_op=True)
    mean: Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return mean
