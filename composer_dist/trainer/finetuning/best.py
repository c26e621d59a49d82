"""A snapshot of the model at its best: trained parameters, their optimizer state and averages, and buffers.

It is kept in host memory, each rank its own part: 12 bytes for each trained parameter in 32 bits with Adam,
16 with an EMA, divided by the number of ranks that share it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from composer_dist.distributed.moving.scatter import copy_into
from composer_dist.distributed.prepared import named_buffers_canonical, named_parameters_canonical
from composer_dist.errors import CheckpointKeyError
from composer_dist.wording import listed

Snapshot = dict[str, Any]
"""`{"parameters": {name: tensor}, "buffers": {name: tensor}, "state": {name: {key: tensor or value}},
"averages": {name: tensor}}`, sharded like the model."""


@torch.no_grad()
def take_snapshot(
    model: nn.Module, optimizers: Sequence[Optimizer], averages: Mapping[str, Tensor] | None = None
) -> Snapshot:
    """A copy of everything that training changes."""
    trained = {name: p for name, p in named_parameters_canonical(model) if p.requires_grad}
    return {
        "parameters": {name: _copy(parameter) for name, parameter in trained.items()},
        "buffers": {name: _copy(buffer) for name, buffer in named_buffers_canonical(model)},
        "state": {
            name: {key: _copy(value) for key, value in optimizer.state[parameter].items()}
            for optimizer in optimizers
            for name, parameter in trained.items()
            if parameter in optimizer.state
        },
        "averages": {name: _copy(average) for name, average in (averages or {}).items()},
    }


@torch.no_grad()
def put_back(
    snapshot: Mapping[str, Any],
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    averages: dict[str, Tensor] | None = None,
) -> None:
    """Writes a snapshot into model, optimizers and averages.

    Other parameters and buffers do not change; other averages are removed.
    """
    parameters = dict(named_parameters_canonical(model))
    buffers = dict(named_buffers_canonical(model))
    named = {**snapshot["parameters"], **snapshot["buffers"]}
    if unknown := sorted(named.keys() - parameters.keys() - buffers.keys()):
        raise CheckpointKeyError(
            f"The model has no {listed(unknown)}: the best weights belong to another model."
        )
    for name, saved in named.items():
        copy_into(parameters[name] if name in parameters else buffers[name], saved)
    for optimizer in optimizers:
        held = {p for group in optimizer.param_groups for p in group["params"]}
        for name in snapshot["parameters"]:
            if parameters[name] in held:
                _put_state(optimizer, parameters[name], snapshot["state"].get(name, {}))
    averages = {} if averages is None else averages
    kept = snapshot.get("averages", {})  # checkpoints of earlier versions have none
    for name in list(averages):
        if name in kept:
            copy_into(averages[name], kept[name])
        else:
            del averages[name]


def _put_state(optimizer: Optimizer, parameter: nn.Parameter, saved: Mapping[str, Any]) -> None:
    """Writes into the tensors of the state and removes what was added after the snapshot."""
    state = optimizer.state[parameter]
    for key in state.keys() - saved.keys():
        del state[key]
    for key, value in saved.items():
        if isinstance(value, Tensor) and isinstance(state.get(key), Tensor):
            copy_into(state[key], value)
        else:
            state[key] = value
    if not state:
        del optimizer.state[parameter]


def _copy(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
