"""DDP in place, and when it averages gradients that accumulate over microbatches."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from functools import partial

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from composer_dist import _torch
from composer_dist.distributed.before_steps import before_every_step
from composer_dist.distributed.forwards import call_through
from composer_dist.distributed.mesh.mesh import Mesh
from composer_dist.distributed.prepared import record, refuse_copy
from composer_dist.distributed.replication.batch_norm import convert_sync_batch_norm
from composer_dist.distributed.replication.plan import ReplicaPlan
from composer_dist.distributed.replication.replica import Replica, replica_of
from composer_dist.distributed.training.average_gradients import average_gradients
from composer_dist.distributed.training.gradients import no_sync
from composer_dist.errors import ParallelismValueError
from composer_dist.structure.structure import Structure


def arm(structure: Structure, plan: ReplicaPlan, mesh: Mesh, optimizers: Sequence[Optimizer]) -> None:
    """Let DDP keep the ranks' copies of a model equal; they have the same weights already.

    Only post-local SGD communicates here, because it makes process groups.
    """
    model = structure.modules[""]
    if plan.sync_batch_norm:
        convert_sync_batch_norm(model, mesh.replica_group)
    parameters = {name: structure.tensors[name].get() for name in plan.averaged}
    replica = Replica(
        model,
        plan,
        parameters=parameters,  # type: ignore[arg-type]
        ignored=[structure.tensors[name].get() for name in plan.ignored],
        mesh=mesh,
    )
    if _torch.is_replicated(model):  # not in evaluation only: it has its own class
        refuse_copy(type(model))
    call_through(model, plan.forward_methods)
    before_every_step(replica, Replica.check_of)
    record(model).follow.append(replica.follow_buffers)
    ends = record(model).ends
    if replica.local_sgd is not None:
        ends.append(replica.settle)
        average = partial(replica.local_sgd.after_step, frozenset(parameters.values()))
        ends += [optimizer.register_step_post_hook(average).remove for optimizer in optimizers]
    ends.append(replica.end)


class DDPSyncStrategy(StrEnum):
    """When the gradients of a replicated model are averaged; Composer's names."""

    SINGLE_AUTO_SYNC = "single_auto_sync"
    """In the last microbatch's backward, for all microbatches. (Older versions of torch left out parameters
    that only earlier microbatches used; Composer's documentation warns of this.)"""
    MULTI_AUTO_SYNC = "multi_auto_sync"
    """In every microbatch's backward."""
    FORCED_SYNC = "forced_sync"
    """Once, after the last microbatch's backward, whichever parameters it used."""


@contextmanager
def ddp_sync_context(
    model: nn.Module, is_final_microbatch: bool, sync_strategy: DDPSyncStrategy | str
) -> Iterator[None]:
    """Run one microbatch's forward and backward of a replicated model.

    Args:
        model: wrapped in DistributedDataParallel, or prepared; its gradients accumulate.
        is_final_microbatch: whether the optimizer steps after it.

    Raises:
        ParallelismValueError: there is no such strategy.
    """
    try:
        strategy = DDPSyncStrategy(sync_strategy)
    except ValueError:
        known = ", ".join(DDPSyncStrategy)
        raise ParallelismValueError(
            f"There is no DDP sync strategy {sync_strategy!r}. Valid strategies: {known}."
        ) from None
    automatic = strategy is DDPSyncStrategy.MULTI_AUTO_SYNC or (
        strategy is DDPSyncStrategy.SINGLE_AUTO_SYNC and is_final_microbatch
    )
    with no_sync(model, enabled=not automatic):
        yield
    if strategy is DDPSyncStrategy.FORCED_SYNC and is_final_microbatch:
        for one in model.modules():
            if (replica := replica_of(one)) is not None:
                replica.average()
            elif isinstance(one, DistributedDataParallel):
                named = one.module.named_parameters()
                kept = [p for name, p in named if p.requires_grad and name not in one.parameters_to_ignore]
                average_gradients(kept, one.process_group)
