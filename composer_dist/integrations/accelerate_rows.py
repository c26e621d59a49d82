"""Which rows each rank of accelerate's data loaders gets, and results of evaluation with each row once."""

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard
from accelerate.utils import find_batch_size, recursively_apply
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

from composer_dist.distributed import sampler_kwargs
from composer_dist.errors import ParallelismValueError
from composer_dist.structure.calling import whole
from composer_dist.tensors.nested import named_tensors


def share_rows(loader: DataLoader[Any], mesh: DeviceMesh, accelerator: Accelerator, what: str) -> None:
    """Give ranks of tp and cp the same rows; accelerate has given every rank its own.

    Raises:
        ParallelismValueError: the loader cannot; the message begins with `what`.
    """
    place = sampler_kwargs(mesh)
    if place == {"num_replicas": accelerator.num_processes, "rank": accelerator.process_index}:
        return
    for shard in (loader.batch_sampler, loader.dataset):
        if isinstance(shard, (BatchSamplerShard, IterableDatasetShard)):
            shard.num_processes, shard.process_index = place["num_replicas"], place["rank"]
            if place["num_replicas"] == 1 and isinstance(shard, BatchSamplerShard):
                shard.even_batches = False  # one process leaves its last batch as it is
            return
    raise ParallelismValueError(
        f"{what} cannot give the ranks of tp and cp the same rows: accelerate has sharded it, or rank 0 "
        "distributes its batches. Pass a data set with a length, or set "
        "accelerator_config={'dispatch_batches': False}."
    )


def gather_once(values: Any, mesh: DeviceMesh, accelerator: Accelerator) -> Any:
    """As `gather_for_metrics`, with the rows of one of the ranks that share them."""
    state = accelerator.gradient_state

    def pick(gathered: Tensor) -> Tensor:
        rows = torch.cat([gathered.chunk(accelerator.num_processes)[one] for one in first])
        return rows[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else rows

    first = one_of_each(mesh, accelerator.device, accelerator.gather)
    return recursively_apply(pick, accelerator.gather(values))


def one_of_each(mesh: DeviceMesh, device: torch.device, gather: Callable[[Tensor], Tensor]) -> list[int]:
    """Of the ranks that share rows the first, in the order of the rows; a collective by `gather`."""
    ranks = gather(torch.tensor([sampler_kwargs(mesh)["rank"]], device=device)).tolist()
    return [ranks.index(one) for one in range(max(ranks) + 1)]


def rows_that_count(
    inputs: Any, mesh: DeviceMesh, accelerator: Accelerator, batch_size: int
) -> tuple[int, int, float | None]:
    """How many rows of a batch count in this rank's results, and how many it has.

    accelerate fills the last batches with copies of the first rows and drops their results when it gathers
    them. All rows count where there is one replica, which gets no copies, and where tensors do not have one
    entry for each row of the set: TRL puts the worse completions of all pairs after the better ones.

    Args:
        batch_size: of the loader, for each rank unless accelerate splits it.

    Returns:
        Both, and the weight of a mean over this rank's rows that count in the mean over all ranks: None on
        all of them where no rows are copies.
    """
    state, rows = accelerator.gradient_state, find_batch_size(inputs) or 0
    lengths = {len(one) for _, one in named_tensors(inputs) if one.dim()}
    place = sampler_kwargs(mesh)
    replicas = place["num_replicas"]
    filled = batch_size // (replicas if accelerator.split_batches else 1)
    # rank 0 adds fewer rows than there are replicas, where it distributes the batches
    alike = lengths == {rows} and (rows == filled or rows * replicas - state.remainder < replicas)
    if replicas == 1 or not (alike and state.end_of_dataloader and state.remainder > 0):
        return rows, rows, None
    counting = min(max(state.remainder - place["rank"] * rows, 0), rows)
    return counting, rows, replicas * counting / state.remainder


def with_rows(values: Any, before: int, after: int) -> Any:
    """Nested whole tensors of `before` rows with `after` rows: the first, and copies of the first one."""

    def resize(tensor: Tensor) -> Tensor:
        tensor = whole(tensor)  # logits are cut under `loss_parallel`
        if before == after or not tensor.dim() or len(tensor) != before:
            return tensor
        return tensor[torch.arange(after, device=tensor.device) % before]

    return recursively_apply(resize, values)
