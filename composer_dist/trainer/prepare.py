"""What the Trainer begins with: its callbacks, and its model, prepared or moved to its device."""

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from composer_dist.composer_model import check_has_values
from composer_dist.distributed.account import Preparation
from composer_dist.distributed.prepare import Weights, parallelize_composer_model
from composer_dist.distributed.prepared import mesh_of
from composer_dist.distributed.ranks import process_group
from composer_dist.distributed.ranks.hangs.guard import HangGuard
from composer_dist.distributed.ranks.launcher_variables import check_alone
from composer_dist.errors import ParallelismValueError
from composer_dist.random_states import seed_all
from composer_dist.trainer.arguments import as_list
from composer_dist.trainer.callbacks import Callback, CheckpointSaver, LRMonitor, ProgressBar, SpeedMonitor
from composer_dist.trainer.clock import Time
from composer_dist.trainer.data.sampling import data_part
from composer_dist.trainer.state import State


def completed(
    callbacks: Callback | Sequence[Callback],
    save_folder: str | os.PathLike[str] | None,
    save_interval: Time | str | int | None,
    progress_bar: bool,
) -> list[Callback]:
    """The given callbacks, a CheckpointSaver for a `save_folder`, and those of every run that are missing."""
    found = as_list("callbacks", callbacks, Callback)
    if save_folder is not None:
        found.insert(0, CheckpointSaver(save_folder, save_interval or "1ep"))
    elif save_interval is not None:
        raise ParallelismValueError(f"save_interval={save_interval!r} needs a save_folder.")
    standard = (LRMonitor, SpeedMonitor, ProgressBar) if progress_bar else (LRMonitor, SpeedMonitor)
    return found + [kind() for kind in standard if not any(isinstance(one, kind) for one in found)]


def prepare_model(
    state: State,
    guard: HangGuard,
    config: Any,
    weights: Weights,
    device: str | torch.device | None,
    seed: int | None,
) -> tuple[Preparation | None, dict[str, int]]:
    """Prepare the state's model, or without a configuration move it to the device.

    Returns:
        What the preparation did, and this rank's part of the data.
    """
    if weights is not None and config is None:
        raise ParallelismValueError(
            "weights= needs a parallelism_config, such as 'fsdp'. For a prepared model, use load_pretrained."
        )
    if process_group.is_distributed() or config is not None:
        process_group.init(device=device, reuse=True)
    elif not dist.is_initialized():
        check_alone(os.environ)
    if seed is not None:
        seed_all(seed)
    preparation, model = None, state.model
    if config is not None:
        optimizers, precision = state.optimizers or None, state.precision
        with guard.at("setup"):
            preparation = parallelize_composer_model(model, optimizers, config, precision, weights=weights)
    mesh = mesh_of(model)
    part = data_part(mesh)
    if seed is not None:
        seed_all(seed + part["rank"])
    state.world_size, state.rank = process_group.world_and_rank()
    state.device = process_group.device_of_group() if device is None else torch.device(device)
    if mesh is None:
        check_has_values(model)
        model.to(process_group.device_here(state.device))
    elif state.device.type != mesh.device_type:
        if device is not None:
            raise ParallelismValueError(f"device='{device}', but the model is on {mesh.device_type!r}.")
        state.device = torch.device(mesh.device_type)
    return preparation, part
