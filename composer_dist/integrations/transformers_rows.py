"""Which rows each rank of accelerate's data loaders gets, and results of evaluation with each row once."""

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard
from accelerate.utils import recursively_apply
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

from composer_dist.distributed import sampler_kwargs
from composer_dist.errors import ParallelismValueError


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
    rank = torch.tensor([sampler_kwargs(mesh)["rank"]], device=accelerator.device)
    ranks = accelerator.gather(rank).tolist()
    first = [ranks.index(one) for one in range(max(ranks) + 1)]

    def pick(gathered: Tensor) -> Tensor:
        rows = gathered.reshape(len(ranks), -1, *gathered.shape[1:])[first].flatten(0, 1)
        return rows[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else rows

    return recursively_apply(pick, accelerator.gather(values))
