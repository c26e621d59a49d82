"""Gathers an optimizer's full state, and loads it onto any number of ranks."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composer_dist.checkpoint.full_state import LoadResult
from composer_dist.checkpoint.gather import agree_on, gather_full
from composer_dist.checkpoint.kinds.optimizer import prepare_optimizer_state
from composer_dist.checkpoint.kinds.optimizer_names import (
    Groups,
    State,
    by_name,
    check_alike,
    check_whole,
    labeled,
    named_optimizer_state,
    parameter_names,
    plain_hashes,
)
from composer_dist.distributed.moving.scatter import fill
from composer_dist.distributed.optimizers.follow import is_low_bit
from composer_dist.distributed.prepared import mesh_of_world, usable_or_marked
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.distributed.ranks.process_group import broadcast, world_and_rank
from composer_dist.errors import CheckpointValueError
from composer_dist.files.mismatch import StateMismatch


def full_optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state with full tensors, copied to the CPU, on rank 0; `{}` on the others.

    A collective on a sharded model. State of frozen parameters is included; 8-bit state becomes float32.
    A key may have a list or dictionary of tensors. "irregular", if it is in the result, names those whose
    shapes do not tell whether they are sharded.

    Args:
        model: prepared or not. A tied parameter has its first name.
        optimizer: of its parameters.

    Returns:
        `{"state": {name: {key: tensor or value}}, "param_groups": [{"params": [names], ...options}]}`.

    Raises:
        CheckpointValueError: the optimizer holds parameters that are not the model's, or state of each rank's
            own that has no full value.
        ParallelismValueError: ranks have state for different parameters.
    """
    named: dict[str, Any] = {"state": {}}
    tensors: dict[str, Tensor] = {}
    error: Exception | None = None
    try:
        named = named_optimizer_state(model, optimizer)
        tensors = labeled(named["state"])
        check_whole(model, named["state"])
    except Exception as caught:
        error = caught
    described = [f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items()]
    if agree_on("full_optimizer_state", model.parameters(), described, error):
        hashes = partial(plain_hashes, model, named["state"])
        Agreement().each("full_optimizer_state", hashes, check_alike)
    full = gather_full(tensors, False, torch.float32 if is_low_bit(optimizer) else None)
    if world_and_rank()[1] != 0:
        return {}
    named["state"] = deepcopy(named["state"], {id(tensor): full[name] for name, tensor in tensors.items()})
    for group in named["param_groups"]:
        for key, value in group.items():
            group[key] = value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else deepcopy(value)
    return named


def load_full_optimizer_state(
    model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any], *, strict: bool = True
) -> LoadResult:
    """Load rank 0's state, by name, and the options of its groups into the optimizer; a collective.

    Afterwards the optimizer continues as the saved one would. No step is taken; pending gradients, frozen
    parameters and the order of parameters do not matter. A parameter that was saved without state has none
    afterwards. If anything is refused, nothing changes.

    Args:
        model: as prepared, or plain.
        optimizer: of its parameters, with the groups that were saved; `foreach`, `fused` and `capturable`
            do not change.
        state: rank 0's is used. From `full_optimizer_state`, from torch's `get_optimizer_state_dict`
            (flattened or not), or from the `state_dict()` of an optimizer on one device, which numbers the
            parameters in the order of the groups.
        strict: raise if names are missing or unexpected. Otherwise parameters that the state lacks keep
            their state, and names that the optimizer does not hold are ignored.

    Returns:
        Names that the state lacks, and names that the optimizer does not hold.

    Raises:
        CheckpointKeyError: `strict`, and names are missing or unexpected: all of them are listed.
        CheckpointValueError: the number of groups, the groups of parameters or shapes do not match, or this
            is not an optimizer's state.
        CheckpointRuntimeError: it failed halfway; the optimizer is unusable from then on.
    """
    plan: dict[str, Any] = {}
    full: dict[str, Tensor] = {}
    held: list[list[str]] = []
    error: Exception | None = None
    try:
        names = parameter_names(model, optimizer)
        held = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
        if world_and_rank()[1] == 0:
            plan = _plan_load(*by_name(state, model, optimizer), [n for group in held for n in group], strict)
            full = plan.pop("full")
            plan["irregular"] = state.get("irregular", ())
    except Exception as caught:
        error = caught
    Agreement().reach("load_full_optimizer_state", held, _same_groups, error)
    plan = Agreement().collectively("load_full_optimizer_state", lambda: broadcast(plan))
    with Agreement().together("load_full_optimizer_state"):
        found = (plan["state"], plan["groups"], plan["irregular"])
        prepared = prepare_optimizer_state(model, optimizer, *found)
    made, scalars = labeled(prepared.values), labeled(plan["state"])
    with usable_or_marked(optimizer):
        with Agreement().together("load_full_optimizer_state"):
            prepared.install()
            for name, scalar in scalars.items():
                if not scalar.ndim:
                    made[name].copy_(scalar)
        targets = {name: tensor for name, tensor in made.items() if tensor.ndim}
        fill(mesh_of_world(model), targets, full, by_part=is_low_bit(optimizer))
    return LoadResult(plan["missing"], plan["unexpected"])


def _plan_load(values: State, groups: Groups | None, held: Sequence[str], strict: bool) -> dict[str, Any]:
    """The state to load; tensors' values are in "full", and everything else is plain."""
    known = {*values, *(name for group in groups or () for name in group["params"])}
    missing = [name for name in held if name not in known]
    unexpected = sorted(known.difference(held))
    StateMismatch(missing, unexpected).check("The state does not match the optimizer", strict)
    state: State = {name: values.get(name, {}) for name in held if name in known}
    tensors = labeled(state)
    odd = [name for name, value in tensors.items() if isinstance(value, DTensor) or value.is_meta]
    if odd:
        raise CheckpointValueError(f"The state has these sharded or without values: {', '.join(odd)}.")
    described = deepcopy(state, {id(tensor): _described(tensor) for tensor in tensors.values()})
    full = {name: tensor.detach() for name, tensor in tensors.items() if tensor.ndim}
    names = {"missing": missing, "unexpected": unexpected}
    return {"state": described, "groups": groups, "full": full, **names}


def _described(value: Tensor) -> Tensor:
    if value.ndim == 0:
        return value.detach().cpu()
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def _same_groups(found: list[list[list[str]]]) -> None:
    for rank, groups in enumerate(found):
        if groups != found[0]:
            raise CheckpointValueError(
                f"The optimizers of ranks 0 and {rank} have different groups or parameters; make them equal."
            )
