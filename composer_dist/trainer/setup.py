"""Where the model is, and which part of the data is this rank's."""

from __future__ import annotations

import torch
from torch import nn

from composer_dist.distributed.mesh.mesh import Mesh
from composer_dist.distributed.ranks import process_group
from composer_dist.errors import ParallelismValueError
from composer_dist.trainer.checks import check_no_meta


def data_part(mesh: Mesh | None) -> dict[str, int]:
    """`num_replicas` and `rank` of this rank's data.

    Raises:
        ParallelismValueError: several ranks have no mesh in common.
    """
    if mesh is not None:
        return mesh.sampler_kwargs()
    world, _ = process_group.world_and_rank()
    if world > 1:
        raise ParallelismValueError(
            f"There are {world} ranks, but neither a parallelism_config nor a prepared model: each "
            "would train a model of its own. Pass parallelism_config='fsdp', for example."
        )
    return {"num_replicas": 1, "rank": 0}


def settle(model: nn.Module, mesh: Mesh | None, device: str | torch.device | None) -> torch.device:
    """The device to train on; a model that was not prepared is moved there.

    Raises:
        ParallelismValueError: the model has no values, or was prepared on another kind of device.
    """
    home = process_group.device_of_group() if device is None else torch.device(device)
    if mesh is None:
        check_no_meta(model)
        model.to(home)
    elif home.type != mesh.device_type:
        if device is not None:
            raise ParallelismValueError(
                f"device='{device}', but the model is prepared on {mesh.device_type!r}."
            )
        home = torch.device(mesh.device_type)
    return home
