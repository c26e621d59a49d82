"""An optimizer's state by the names of its parameters.

torch keys state by parameter objects and saves it by numbers. By name it can be loaded with other groups,
ranks and frozen parameters. Nothing here takes a step or communicates: the state of a shard is a shard.

`by_name` converts the common forms of optimizer states to this one: the named form of
`torch.distributed.checkpoint.state_dict` (as ours), its flattened form (`state.<name>.<key>` and
`param_groups.<name>.<option>`, one level), and `optimizer.state_dict()` of a single process (numbers, in the
order of the optimizer's groups).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composer_dist.distributed.optimizers.follow import inner_optimizers
from composer_dist.distributed.prepared import check_usable, named_parameters_canonical
from composer_dist.errors import CheckpointError, CheckpointValueError
from composer_dist.structure.names import canonical_name
from composer_dist.tensors.fingerprint import fingerprint
from composer_dist.tensors.inner import local_part
from composer_dist.tensors.nested import named_tensors
from composer_dist.wording import listed

State = dict[str, dict[str, Any]]
"""Parameter name to key to a tensor, a plain value, or a list or dictionary of them."""
Groups = list[dict[str, Any]]
"""Parameter groups with names in place of parameters."""


def named_optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state with names in place of parameters: its own tensors, sharded as they are.

    Args:
        model: prepared or not. A tied parameter has its first name.
        optimizer: any of its parameters may be frozen, or without state.

    Returns:
        `{"state": {name: {key: tensor or value}}, "param_groups": [{"params": [names], ...options}]}`, and
        the labels of irregular tensors, if there are any, as "irregular".

    Raises:
        CheckpointError: as from `parameter_names`.
    """
    names = parameter_names(model, optimizer)
    order = {name: place for place, name in enumerate(names.values())}
    state = {names[id(p)]: dict(values) for p, values in optimizer.state.items() if values}
    odd = [one for p, values in optimizer.state.items() for one in _irregular(names[id(p)], p, values)]
    return {
        "state": {name: state[name] for name in sorted(state, key=order.__getitem__)},
        "param_groups": [
            {**group, "params": [names[id(parameter)] for parameter in group["params"]]}
            for group in optimizer.param_groups
        ],
        **({"irregular": odd} if odd else {}),
    }


def label(name: str, path: str) -> str:
    """What a tensor of a parameter's state is called; in a list or dictionary the path has several keys."""
    return f"{path} of {name}"


def labeled(state: State) -> dict[str, Tensor]:
    """The tensors of a state by their labels.

    Raises:
        CheckpointValueError: two have the same label.
    """
    pairs = [
        (label(name, path), one) for name, values in state.items() for path, one in named_tensors(values)
    ]
    found = dict(pairs)
    if len(found) < len(pairs):
        odd = sorted({one for one, tensor in pairs if found[one] is not tensor})
        raise CheckpointValueError(f"The optimizer has several tensors as {', '.join(odd)}; rename its keys.")
    return found


def follows(shape: Sequence[int], parameter: Tensor) -> bool:
    """Whether state has the dimensions of its parameter, some of which may be 1."""
    same = len(shape) == parameter.ndim
    return same and all(size in (full, 1) for size, full in zip(shape, parameter.shape, strict=True))


def _irregular(name: str, parameter: Tensor, values: Mapping[str, Any]) -> list[str]:
    """Labels of tensors in lists and dictionaries whose shapes do not tell whether they are DTensors.

    They are plain tensors that have the dimensions of a sharded parameter, and DTensors that have others.
    """
    return [
        label(name, path)
        for path, value in (named_tensors(values) if isinstance(parameter, DTensor) else ())
        if path not in values and value.ndim and isinstance(value, DTensor) != follows(value.shape, parameter)
    ]


def parameter_names(model: nn.Module, optimizer: Optimizer) -> dict[int, str]:
    """Names of the model's parameters, in the model's order, by the identity of the object.

    Raises:
        CheckpointValueError: the optimizer holds parameters that are not the model's, or an inner optimizer
            that keeps its state apart.
        CheckpointRuntimeError: an earlier load into the optimizer failed halfway.
    """
    check_usable(optimizer)
    for inner in inner_optimizers(optimizer):
        if inner.state is not optimizer.state:
            raise CheckpointValueError(
                f"{type(optimizer).__name__} keeps state in an inner {type(inner).__name__}, which would "
                "not be in the checkpoint, nor loaded from it. Let both share one `state`, or use another."
            )
    names = {id(parameter): name for name, parameter in named_parameters_canonical(model)}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    foreign = [p for p in {id(p): p for p in [*held, *optimizer.state]}.values() if id(p) not in names]
    if foreign:
        raise CheckpointValueError(
            f"{type(optimizer).__name__} holds {len(foreign)} parameters (of {len(held)}) that are not this "
            f"model's, the first of shape {tuple(getattr(foreign[0], 'shape', ()))}; pass the model "
            "that it trains, and pass the optimizer to parallelize_model or build it afterwards."
        )
    return names


def model_of(optimizer: Optimizer, models: list[nn.Module]) -> nn.Module:
    """The model that an optimizer trains.

    Raises:
        CheckpointValueError: it holds parameters of none of the models, or of several.
    """
    if not models:
        raise CheckpointValueError(
            f"{type(optimizer).__name__} is saved by the names of its model's parameters, but there is no "
            "model; add it to the state, or pass model=."
        )
    for number, model in enumerate(models):
        try:
            parameter_names(model, optimizer)
        except CheckpointError:
            if number == len(models) - 1:
                raise
        else:
            return model
    raise AssertionError


def by_name(state: Mapping[str, Any], model: nn.Module, optimizer: Optimizer) -> tuple[State, Groups | None]:
    """State and groups by the model's names: without wrapper segments, and by the first name of ties.

    Args:
        optimizer: numbers count parameters in the order of its groups.

    Raises:
        CheckpointValueError: this is not an optimizer's state, or its number of groups or numbered parameters
            does not match.
    """
    if not isinstance(state, Mapping):
        raise CheckpointValueError(f"An optimizer's state must be a mapping, not a {type(state).__name__}.")
    first = {id(parameter): name for name, parameter in named_parameters_canonical(model)}
    every = named_parameters_canonical(model, remove_duplicate=False)
    names = {name: first[id(parameter)] for name, parameter in every}
    held = [[first[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    values, groups = state.get("state", {}), list(state.get("param_groups") or [])
    if any(isinstance(key, str) and key.startswith("state.") for key in state):
        values, groups = _unflatten(state, held)
    elif state and not {"state", "param_groups"} & set(state):
        raise CheckpointValueError(
            f"This is not an optimizer's state: it has {', '.join(map(repr, list(state)[:4]))}, but neither "
            "'state' nor 'param_groups'."
        )
    if groups:
        check_group_count(groups, optimizer)
    numbers = _numbers(values, groups, held, list(first.values()))

    def name_of(key: Any) -> str:
        name = canonical_name(numbers.get(key, str(key)))
        return names.get(name, name)

    named = {name_of(key): dict(entry) for key, entry in values.items()}
    renamed = [{**group, "params": [name_of(key) for key in group["params"]]} for group in groups]
    return named, renamed or None


def check_group_count(groups: Sequence[Mapping[str, Any]], optimizer: Optimizer) -> None:
    """Raise unless the number of groups is the optimizer's."""
    if len(groups) != len(optimizer.param_groups):
        raise CheckpointValueError(
            f"The state has {len(groups)} parameter group{'s' if len(groups) != 1 else ''}, the optimizer "
            f"{len(optimizer.param_groups)}; build the optimizer with the groups that were saved."
        )


def check_whole(model: nn.Module, state: State) -> None:
    """Raise if an optimizer has plain tensors of this rank's part of a parameter as state; names them."""
    parameters = dict(named_parameters_canonical(model))
    faults = [
        label(name, path)
        for name, values in state.items()
        for path, value in named_tensors(values)
        if not isinstance(value, DTensor)
        and value.shape == local_part(parameters[name]).shape != parameters[name].shape
    ]
    if faults:
        raise CheckpointValueError(
            f"The optimizer keeps state for each rank's part of a parameter in plain tensors that have no "
            f"full value: {', '.join(faults)}. Make them DTensors with the parameter's placements."
        )


def plain_hashes(model: nn.Module, state: State) -> dict[str, int]:
    """Hashes of the plain tensors in the state of sharded parameters, of which one rank's are saved."""
    parameters = dict(named_parameters_canonical(model))
    return {
        label(name, path): fingerprint(value)
        for name, values in state.items()
        if isinstance(shard := parameters[name], DTensor)
        if not all(placement.is_replicate() for placement in shard.placements)
        for path, value in named_tensors(values)
        if value.ndim and not isinstance(value, DTensor)
    }


def check_alike(hashes: Sequence[Mapping[str, int]]) -> None:
    """Raise if ranks have different `plain_hashes`; names the tensors."""
    names = dict.fromkeys(name for mine in hashes for name in mine)
    if odd := [name for name in names if len({mine[name] for mine in hashes if name in mine}) > 1]:
        raise CheckpointValueError(
            f"The optimizer keeps state of sharded parameters in plain tensors that differ between ranks: "
            f"{listed(odd)}. A checkpoint holds one value of each. Make them equal on all ranks, or DTensors "
            "with the parameter's placements."
        )


def _numbers(
    values: Mapping[Any, Any],
    groups: Sequence[Mapping[str, Any]],
    held: Sequence[Sequence[str]],
    order: Sequence[str],
) -> dict[int, str]:
    """Numbers in a state to names, by the optimizer's groups (`held`); {} if it has names already."""
    keys = [*values, *(key for group in groups for key in group["params"])]
    if not any(isinstance(key, int) for key in keys):
        return {}
    if not groups:  # only the model gives the order
        every = {name for group in held for name in group}
        return dict(enumerate(name for name in order if name in every))
    found: dict[int, str] = {}
    for number, (group, own) in enumerate(zip(groups, held, strict=True)):
        own = group.get("param_names", own)
        if len(own) != len(group["params"]):
            raise CheckpointValueError(
                f"The state numbers its parameters, and its group {number} has {len(group['params'])} "
                f"parameters, the optimizer's {len(own)}. Build the optimizer with the saved parameters."
            )
        found.update(zip(group["params"], own, strict=True))
    return found


def _unflatten(
    state: Mapping[str, Any], held: Sequence[Sequence[str]]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The flattened form as nested mappings, with groups as the optimizer has them."""
    values: dict[str, Any] = {}
    options: dict[str, dict[str, Any]] = {}
    for flat, value in state.items():
        kind, _, rest = flat.partition(".")
        name, _, key = rest.rpartition(".")
        (values if kind == "state" else options).setdefault(canonical_name(name), {})[key] = value
    groups: list[dict[str, Any]] = []
    for number, names in enumerate(held):
        known = [name for name in names if name in options]
        odd = [name for name in known if options[name] != options[known[0]]]
        if odd:
            raise CheckpointValueError(
                f"Parameters of the optimizer's group {number} have different options in the state: "
                f"{known[0]} and {odd[0]}. Build the optimizer with the groups that were saved."
            )
        groups.append({**(options[known[0]] if known else {}), "params": known})
    return values, groups if options else []
