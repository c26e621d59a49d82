"""A notebook's process: it has prepared a model by itself, and then launches ranks by fork."""

import gc

import torch.distributed as dist
from torch import nn

from composer_dist import _torch
from composer_dist.distributed import launch, parallelize_model, process_group
from composer_dist.distributed.mesh import mesh


def prepared() -> int:
    process_group.init()
    parallelize_model(nn.Linear(4, 4), {})
    ranks = dist.get_world_size()
    process_group.destroy()
    return ranks


if __name__ == "__main__":
    process_group.init()
    parallelize_model(nn.Linear(4, 4), {})
    dist.destroy_process_group()
    _torch.clear_dtensor_caches()
    mesh._recent.clear()
    gc.collect()  # what still holds the groups is what this library keeps for the next model
    print(launch(prepared, 2, "fork"))
