"""Optimizers in checkpoints, by the names of their model's parameters.

The state to load is made and checked first; only `PreparedState.install` changes the optimizer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from composer_dist.checkpoint.format.opened import Opened
from composer_dist.checkpoint.kinds.filling import fill_tensors
from composer_dist.checkpoint.kinds.kind import Chosen, Restore
from composer_dist.checkpoint.kinds.optimizer_names import (
    State,
    by_name,
    check_group_count,
    check_whole,
    follows,
    label,
    labeled,
    model_of,
    named_optimizer_state,
    parameter_names,
)
from composer_dist.distributed.mesh.layout import Layout
from composer_dist.distributed.moving.scatter import scatter_into
from composer_dist.distributed.optimizers.follow import (
    empty_state,
    is_low_bit,
    is_whole,
    low_bit_state,
    scalar_device,
)
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.errors import CheckpointKeyError, CheckpointValueError, Faults
from composer_dist.tensors.inner import as_floats, dtensor_of
from composer_dist.tensors.nested import map_tensors, named_tensors

_OWN = frozenset({"params", "param_names", "foreach", "fused", "capturable"})
"""The options that an optimizer keeps: its parameters, and the implementation of the step."""

_KINDS = frozenset(
    {"betas", "momentum", "dampening", "nesterov", "amsgrad", "alpha", "centered", "lr_decay", "rho", "lambd"}
    | {"etas", "momentum_decay", "max_iter", "initial_accumulator_value"}
)
"""Options by which torch's optimizers differ."""


def owns(value: Any) -> bool:
    """Whether it is a torch optimizer."""
    return isinstance(value, Optimizer)


def extract(key: str, value: Any, models: list[nn.Module], chosen: Chosen | None, whole: bool) -> Any:
    """Its state by parameter names, and its groups."""
    model = model_of(value, models)
    found = named_optimizer_state(model, value)
    check_whole(model, found["state"])
    if is_low_bit(value):  # each rank quantizes its own part, which others could not decode
        found["state"] = {
            name: map_tensors(lambda _, tensor: as_floats(tensor), values)
            for name, values in found["state"].items()
        }
    if chosen is not None:
        found["state"] = {name: values for name, values in found["state"].items() if chosen(name, values)}
    return found


def guess(code: Any) -> bool:
    """Whether it is a mapping with the keys of `optimizer.state_dict()`."""
    pairs = code.get("dict", code.get("ordered")) or ()
    return {"state", "param_groups"} <= {name for name, _ in pairs}


@dataclass
class _OptimizerLoading:
    opened: Opened
    optimizer: Optimizer
    model: nn.Module
    described: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]] | None
    paths: dict[int, str]
    """The path of each tensor in `described`, by identity; those in tuples have values instead."""
    irregular: Collection[str]
    prepared: PreparedState | None = None

    def prepare(self) -> None:
        found = (self.described, self.groups, self.irregular)
        self.prepared = prepare_optimizer_state(self.model, self.optimizer, *found)

    def load(self, agreement: Agreement) -> None:
        assert self.prepared is not None
        made = labeled(self.prepared.values)
        tensors: dict[str, Tensor] = {}
        with agreement.together("the optimizer's state"):
            self.prepared.install()
            for one, value in labeled(self.described).items():
                if id(value) in self.paths:
                    tensors[self.paths[id(value)]] = made[one]
                else:
                    scatter_into(made[one], value)
        fill_tensors(self.opened, tensors, agreement)


def plan(restore: Restore, key: str) -> _OptimizerLoading:
    """Match by the names of parameters; numbers count parameters in the order of the optimizer's groups."""
    opened, mismatch, optimizer = restore.opened, restore.mismatch, restore.state[key]
    model = model_of(optimizer, restore.models)
    paths: dict[int, str] = {}
    stored = opened.described(opened.structure[key], paths)
    state, groups = by_name(stored, model, optimizer)
    names = parameter_names(model, optimizer)
    held = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    known = dict.fromkeys([*state, *(name for group in groups or () for name in group["params"])])
    names_held = set(held)
    wanted = [name for name in held if not restore.ignore(f"{key}.{name}")]
    mismatch.missing += [f"{key}.{name}" for name in wanted if name not in known]
    unknown = [name for name in known if name not in names_held]
    mismatch.unexpected += [f"{key}.{name}" for name in unknown if not restore.ignore(f"{key}.{name}")]
    described = {name: state.get(name, {}) for name in wanted if name in known}
    for group in groups or ():  # a learning rate may be a tensor
        group.update({option: opened.read(value, paths) for option, value in group.items()})
    irregular = stored.get("irregular", ())
    return _OptimizerLoading(opened, optimizer, model, described, groups, paths, irregular)


@dataclass(frozen=True)
class PreparedState:
    """State made for an optimizer, which does not change until `install`."""

    optimizer: Optimizer
    values: State
    """Tensors (shards) to be filled, plain values as given."""
    parameters: dict[str, nn.Parameter]
    options: list[dict[str, Any]]
    """The options for each group; [] for none."""

    def install(self) -> None:
        """Set the state and the options in the optimizer."""
        optimizer = self.optimizer
        for name, values in self.values.items():
            if values:
                optimizer.state[self.parameters[name]] = values
            else:
                optimizer.state.pop(self.parameters[name], None)
        for group, options in zip(optimizer.param_groups, self.options, strict=False):
            for key, value in options.items():
                _set_option(group, key, value)
        # As load_state_dict does: optimizers update states of their older versions here.
        optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})


def prepare_optimizer_state(
    model: nn.Module,
    optimizer: Optimizer,
    described: Mapping[str, Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]] | None = None,
    irregular: Collection[str] = (),
) -> PreparedState:
    """Make the described state without values, for a reader to fill; the optimizer does not change yet.

    A tensor with the dimensions of its parameter is laid out like the parameter, any other is whole; existing
    tensors that match are reused. No step is taken.

    Args:
        described: parameter name to key to a plain value, to a tensor, of which only the full shape and
            dtype are used (it may be on meta), or to a list or dictionary of them. A parameter with `{}`
            loses its state, a parameter that is not named keeps it.
        groups: parameter groups by name, whose options are loaded too; see `match_groups`.
        irregular: labels of tensors to which the rule above does not apply, from `named_optimizer_state`.

    Raises:
        CheckpointKeyError: names that the optimizer does not hold.
        CheckpointValueError: shapes do not match the parameters, or the groups do not match.
        CheckpointRuntimeError: an earlier load into the optimizer failed halfway.
    """
    names = parameter_names(model, optimizer)
    held = {names[id(p)]: (p, group) for group in optimizer.param_groups for p in group["params"]}
    if unknown := [name for name in described if name not in held]:
        raise CheckpointKeyError(f"The optimizer does not hold these parameters: {', '.join(unknown)}.")
    options = [] if groups is None else match_groups(model, optimizer, groups)
    flat = isinstance(optimizer, torch.optim.LBFGS)  # the first parameter has state for all of them
    made: State = {}
    with Faults("The state does not match the optimizer: ", ".", "; ", CheckpointValueError) as faults:
        for name, values in described.items():
            parameter, group = held[name]
            now = dict(named_tensors(optimizer.state.get(parameter, {})))
            new: dict[int, Any] = {}
            for path, value in named_tensors(values):
                if path in values:
                    like = value.ndim == parameter.ndim
                    if not flat and (fault := _misfit(value, parameter, now.get(path))):
                        faults.append(f"{label(name, path)}: {fault}")
                        continue
                else:
                    like = follows(value.shape, parameter) != (label(name, path) in irregular)
                new[id(value)] = _kept_or_made(optimizer, path, value, parameter, group, now.get(path), like)
            made[name] = deepcopy(dict(values), new)  # with the new tensors in place of the described ones
    return PreparedState(optimizer, made, {name: held[name][0] for name in made}, options)


def match_groups(
    model: nn.Module, optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The options for each group of the optimizer, from the groups that hold its parameters by name.

    The order of groups, and of parameters within them, does not matter.

    Raises:
        CheckpointValueError: the number of groups differs, parameters of one group come from several, or the
            groups are of another kind of optimizer.
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
                f"{examples}. Build the optimizer with the groups that were saved."
            )
        source = groups[homes[0]] if homes else {} if own else groups[number]
        theirs, ours = _KINDS.intersection(source), _KINDS.intersection(optimizer.defaults)
        if theirs - ours and ours - theirs:
            raise CheckpointValueError(
                f"The state is of another kind of optimizer than {type(optimizer).__name__}: its groups have "
                f"{', '.join(sorted(theirs - ours))}, but not {', '.join(sorted(ours - theirs))}."
            )
        matched.append({key: deepcopy(value) for key, value in source.items() if key not in _OWN})
    return matched


def _set_option(group: dict[str, Any], key: str, value: Any) -> None:
    """Set an option; an existing tensor is filled in place (a compiled step holds it), a number stays one."""
    now = group.get(key)
    if isinstance(now, Tensor):
        now.copy_(torch.as_tensor(value))
    elif isinstance(value, Tensor) and isinstance(now, (int, float)):
        group[key] = value.item()
    else:
        group[key] = value


def _misfit(value: Tensor, parameter: Tensor, now: Any) -> str | None:
    """Why a state tensor cannot belong to a parameter, if it cannot."""
    if value.ndim != parameter.ndim or (isinstance(now, Tensor) and now.shape == value.shape):
        return None
    if follows(value.shape, parameter):
        return None
    return f"{tuple(value.shape)} in the state, its parameter is {tuple(parameter.shape)}"


def _kept_or_made(
    optimizer: Optimizer,
    path: str,
    value: Tensor,
    parameter: nn.Parameter,
    group: Mapping[str, Any],
    now: Tensor | None,
    like: bool,
) -> Tensor:
    """The existing tensor if it matches `value`, else an uninitialized one: `like` its parameter or whole."""
    key = path.rpartition(".")[2]
    if is_low_bit(optimizer) and value.shape == parameter.shape and value.ndim:
        kept = now is not None and now.shape == value.shape
        return now if now is not None and kept else low_bit_state(optimizer, parameter, key)
    dtype = _dtype(optimizer, key, value, parameter)
    kept = now is not None and (now.shape, now.dtype) == (value.shape, dtype)
    if now is not None and kept and Layout.known(now) and not is_whole(now, parameter):
        return now
    if value.ndim == 0:
        return torch.zeros((), dtype=dtype, device=scalar_device(key, parameter, group, torch.device("cpu")))
    if like and value.ndim == parameter.ndim:
        return empty_state(parameter, tuple(value.shape), dtype)
    whole = torch.empty(value.shape, dtype=dtype, device=parameter.device)
    if like and isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        return dtensor_of(whole, mesh, [Replicate()] * mesh.ndim, value.shape)
    return whole


def _dtype(optimizer: Optimizer, key: str, value: Tensor, parameter: Tensor) -> torch.dtype:
    """For torch's own optimizers the parameter's, as in `load_state_dict`; others keep the stored one."""
    own = any(
        cls.__module__.startswith("torch.optim.") for cls in type(optimizer).__mro__ if cls is not Optimizer
    )
    floating = value.is_floating_point() and parameter.is_floating_point()
    return parameter.dtype if own and floating and key != "step" else value.dtype
