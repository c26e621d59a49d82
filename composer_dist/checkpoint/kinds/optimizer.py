"""An optimizer's state by name: read as it lies, and made anew for what is about to be read.

torch keys state by parameter objects and saves it by numbers; here it is keyed by the parameters' names,
so that it fits however many groups, ranks and frozen parameters there are. Nothing here takes a step or
communicates: the state of a shard is a shard. What is to be loaded is made and checked first, and put in its
place by `install` alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composer_dist.distributed.optimizers.follow import empty_state, scalar_device
from composer_dist.distributed.prepared import check_usable, named_parameters_canonical
from composer_dist.errors import CheckpointKeyError, CheckpointValueError
from composer_dist.tensors.inner import local_part


def check_group_count(groups: Sequence[Mapping[str, Any]], optimizer: Optimizer) -> None:
    """Refuse another number of groups than the optimizer has.

    Raises:
        CheckpointValueError: says both numbers.
    """
    if len(groups) != len(optimizer.param_groups):
        raise CheckpointValueError(
            f"The state has {len(groups)} parameter group{'s' if len(groups) != 1 else ''}, the optimizer "
            f"{len(optimizer.param_groups)}; make the optimizer with the groups that were saved."
        )


State = dict[str, dict[str, Any]]
"""Parameter name to key to a tensor or a plain value."""


Groups = list[dict[str, Any]]
"""Parameter groups with names in place of parameters."""


def named_optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state with names in place of parameters: its own tensors, sharded as they are.

    Args:
        model: prepared or not. A tied parameter goes by its first name.
        optimizer: any of its parameters may be frozen, or without state.

    Returns:
        `{"state": {name: {key: tensor or value}}, "param_groups": [{"params": [names], ...options}]}`.

    Raises:
        CheckpointValueError: the optimizer holds parameters that are not the model's; says how many.
        CheckpointRuntimeError: it was loaded half.
    """
    names = parameter_names(model, optimizer)
    order = {name: place for place, name in enumerate(names.values())}
    state = {names[id(p)]: dict(values) for p, values in optimizer.state.items() if values}
    return {
        "state": {name: state[name] for name in sorted(state, key=order.__getitem__)},
        "param_groups": [
            {**group, "params": [names[id(parameter)] for parameter in group["params"]]}
            for group in optimizer.param_groups
        ],
    }


@dataclass(frozen=True)
class PreparedState:
    """State made for an optimizer, which is as it was until `install`."""

    optimizer: Optimizer
    values: State
    """Tensors (shards) to be filled, plain values as given."""
    parameters: dict[str, nn.Parameter]
    options: list[dict[str, Any]]
    """What each group is given; [] for nothing."""

    def install(self) -> None:
        """Put the state and the options in their places."""
        optimizer = self.optimizer
        for name, values in self.values.items():
            if values:
                optimizer.state[self.parameters[name]] = values
            else:
                optimizer.state.pop(self.parameters[name], None)
        for group, options in zip(optimizer.param_groups, self.options, strict=False):
            for key, value in options.items():
                _set_option(group, key, value)
        # As load_state_dict does: optimizers bring what older versions of them have saved up to date here.
        optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})


def prepare_optimizer_state(
    model: nn.Module,
    optimizer: Optimizer,
    described: Mapping[str, Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]] | None = None,
) -> PreparedState:
    """Make the state that is described, without values, for a reader to fill; nothing changes yet.

    A tensor with the dimensions of its parameter is laid out as the parameter is; what is there already
    and fits is used again. No step is taken.

    Args:
        described: parameter name to key to a tensor, of which only the full shape and dtype count (it may
            be on meta), or to a plain value. A parameter with `{}` loses its state, one that is not named
            keeps it.
        groups: parameter groups by name, whose options go along; see `match_groups`.

    Raises:
        CheckpointKeyError: names that the optimizer does not hold.
        CheckpointValueError: shapes that do not go with their parameters; the groups do not match.
        CheckpointRuntimeError: the optimizer was loaded half before.
    """
    names = parameter_names(model, optimizer)
    held = {names[id(p)]: (p, group) for group in optimizer.param_groups for p in group["params"]}
    if unknown := [name for name in described if name not in held]:
        raise CheckpointKeyError(f"The optimizer does not hold these parameters: {', '.join(unknown)}.")
    options = [] if groups is None else match_groups(model, optimizer, groups)
    faults: list[str] = []
    made: State = {}
    for name, values in described.items():
        parameter, group = held[name]
        now = optimizer.state.get(parameter, {})
        made[name] = {}
        for key, value in values.items():
            if isinstance(value, Tensor):
                if fault := _misfit(value, parameter, now.get(key)):
                    faults.append(f"{key} of {name}: {fault}")
                    continue
                value = _kept_or_made(optimizer, key, value, parameter, group, now.get(key))
            made[name][key] = value
    if faults:
        raise CheckpointValueError(f"The state does not fit the optimizer: {'; '.join(faults)}.")
    return PreparedState(optimizer, made, {name: held[name][0] for name in made}, options)


def match_groups(
    model: nn.Module, optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The options for each group of the optimizer, from the groups that hold its parameters by name.

    The order of groups, and of parameters within them, does not matter.

    Raises:
        CheckpointValueError: another number of groups, or parameters of one group come from several.
    """
    check_group_count(groups, optimizer)
    names = parameter_names(model, optimizer)
    home = {name: number for number, group in enumerate(groups) for name in group["params"]}
    matched: list[dict[str, Any]] = []
    for number, group in enumerate(optimizer.param_groups):
        own = [names[id(parameter)] for parameter in group["params"]]
        homes = sorted({home[name] for name in own if name in home})
        if len(homes) > 1:
            examples = ", ".join(f"{next(n for n in own if home.get(n) == one)} ({one})" for one in homes)
            raise CheckpointValueError(
                f"Parameters of the optimizer's group {number} come from groups {homes} of the state: "
                f"{examples}. Make the optimizer with the groups that were saved."
            )
        source = groups[homes[0]] if homes else {} if own else groups[number]
        matched.append({key: deepcopy(value) for key, value in source.items() if key not in _OWN})
    return matched


def check_whole(model: nn.Module, state: State) -> None:
    """Refuse state that an optimizer has made from this rank's part of a parameter alone.

    Raises:
        CheckpointValueError: names it.
    """
    parameters = dict(named_parameters_canonical(model))
    faults = [
        f"{key} of {name}"
        for name, values in state.items()
        for key, value in values.items()
        if isinstance(value, Tensor)
        and not isinstance(value, DTensor)
        and value.shape == local_part(parameters[name]).shape != parameters[name].shape
    ]
    if faults:
        raise CheckpointValueError(
            f"The optimizer keeps these for each rank's part of a parameter, as plain tensors that have no "
            f"full value: {', '.join(faults)}. Make them DTensors, of the parameter's placements."
        )


def parameter_names(model: nn.Module, optimizer: Optimizer) -> dict[int, str]:
    """Names of the model's parameters, in the model's order, by the identity of the object.

    Raises:
        CheckpointValueError: the optimizer holds parameters that are not the model's; says how many.
        CheckpointRuntimeError: the optimizer was loaded half.
    """
    check_usable(optimizer)
    names = {id(parameter): name for name, parameter in named_parameters_canonical(model)}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    foreign = [p for p in {id(p): p for p in [*held, *optimizer.state]}.values() if id(p) not in names]
    if foreign:
        raise CheckpointValueError(
            f"{type(optimizer).__name__} holds {len(foreign)} parameters (of {len(held)}) that are not this "
            f"model's, the first of shape {tuple(getattr(foreign[0], 'shape', ()))}; pass the model "
            "that it trains, and hand the optimizer to parallelize_model, or build it afterwards."
        )
    return names


_OWN = frozenset({"params", "param_names", "foreach", "fused", "capturable"})
"""What a group has of its own: which parameters, and how they are stepped, not by how much."""


def _set_option(group: dict[str, Any], key: str, value: Any) -> None:
    """A tensor stays the tensor that it is (a compiled step holds it), a number a number."""
    now = group.get(key)
    if isinstance(now, Tensor):
        now.copy_(torch.as_tensor(value))
    elif isinstance(value, Tensor) and isinstance(now, (int, float)):
        group[key] = value.item()
    else:
        group[key] = value


def _misfit(value: Tensor, parameter: Tensor, now: Any) -> str | None:
    """Why a state tensor cannot belong to a parameter, if it cannot; one of other dimensions is whole."""
    if value.ndim != parameter.ndim or (isinstance(now, Tensor) and now.shape == value.shape):
        return None
    if all(size in (full, 1) for size, full in zip(value.shape, parameter.shape, strict=True)):
        return None
    return f"{tuple(value.shape)} in the state, its parameter is {tuple(parameter.shape)}"


def _kept_or_made(
    optimizer: Optimizer,
    key: str,
    value: Tensor,
    parameter: nn.Parameter,
    group: Mapping[str, Any],
    now: Any,
) -> Tensor:
    """The tensor that is there, if it is like `value`, or an uninitialized one."""
    if is_low_bit(optimizer) and value.shape == parameter.shape and value.ndim:
        same = isinstance(now, Tensor) and now.shape == value.shape
        return now if same else optimizer._new_buffer(parameter, key == "exp_avg")  # type: ignore[attr-defined,no-any-return]
    dtype = _dtype(optimizer, key, value, parameter)
    if isinstance(now, Tensor) and (now.shape, now.dtype) == (value.shape, dtype):
        return now
    if value.ndim == 0:
        return torch.zeros((), dtype=dtype, device=scalar_device(key, parameter, group, torch.device("cpu")))
    if value.ndim != parameter.ndim:
        return torch.empty(value.shape, dtype=dtype, device=parameter.device)
    return empty_state(parameter, tuple(value.shape), dtype)


def _dtype(optimizer: Optimizer, key: str, value: Tensor, parameter: Tensor) -> torch.dtype:
    """For torch's own optimizers the parameter's, as in `load_state_dict`; others may want another."""
    own = any(
        cls.__module__.startswith("torch.optim.") for cls in type(optimizer).__mro__ if cls is not Optimizer
    )
    floating = value.is_floating_point() and parameter.is_floating_point()
    return parameter.dtype if own and floating and key != "step" else value.dtype


def is_low_bit(optimizer: Optimizer) -> bool:
    """Whether it quantizes each rank's part of its state by itself, as those of `torchao.optim` do."""
    return hasattr(optimizer, "_new_buffer")
