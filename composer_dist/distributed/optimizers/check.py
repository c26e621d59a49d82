"""Checks whether optimizers can follow their parameters, before anything is changed."""

import gc
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composer_dist import _torch
from composer_dist.distributed.before_steps import before_every_step
from composer_dist.distributed.optimizers.follow import inner_optimizers, is_made_at_construction, names_by_id
from composer_dist.errors import Faults, ParallelismTypeError, ParallelismValueError
from composer_dist.structure.names import canonical_name
from composer_dist.structure.structure import Structure
from composer_dist.tensors.inner import codec_of
from composer_dist.tensors.nested import tensors_in
from composer_dist.wording import listed

_KNOWN = ("torch.optim", "torch.distributed.optim", "transformers.optimization")
_UNABLE: dict[str, tuple[int, str]] = {
    "LBFGS": (1, "it steps along one flat vector of all parameters"),
    "SparseAdam": (1, "FSDP2's gradients are dense (with DDP they may be sparse)"),
    "Rprop": (1, "DTensor (torch 2.13) has no masked assignment, which it uses"),
    "Adafactor": (2, "DTensor (torch 2.13) cannot average its squares over sharded rows in place"),
    "ZeroRedundancyOptimizer": (
        1,
        "it divides the optimizer's state between ranks, as sharding does already",
    ),
}
"""Classes that cannot step on sharded parameters of at least so many dimensions, and why."""


_OR_WHOLE = ", or Rule(..., shard=False) for their modules."
_UNFUSED = {"SGD", "Adagrad"}
"""torch's classes whose fused kernel DTensor (torch 2.13) does not know."""


def check_optimizers(
    optimizers: Sequence[Optimizer],
    structure: Structure,
    plain: Mapping[str, str],
    sizes: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Refuse optimizers that could not follow their parameters on a mesh of these sizes."""
    losses, names = _losses(sizes), names_by_id(structure)
    groups = [group for optimizer in optimizers for group in getattr(optimizer, "param_groups", ())]
    trainable = any(one.info.requires_grad for one in structure.parameters.values())
    idle = trainable and not any(one.requires_grad for group in groups for one in group["params"])
    with Faults() as faults:
        for index, optimizer in enumerate(optimizers):
            kind = type(optimizer).__name__
            if not isinstance(optimizer, Optimizer):
                raise ParallelismTypeError(f"optimizer {index} is a {kind}, not an Optimizer.")
            label = f"optimizer {index} ({kind})" if len(optimizers) > 1 else kind
            faults += [f"{label} {fault}" for fault in _faults(optimizer, names, plain, losses, idle)]


def _faults(
    optimizer: Optimizer, names: Mapping[int, str], plain: Mapping[str, str], losses: int, idle: bool
) -> Iterator[str]:
    """What is wrong with one; `idle`: all together hold only frozen parameters of a model with others."""
    inside = inner_optimizers(optimizer)
    kind = type(inside[0]).__name__ if inside else "optimizer"
    if not _torch.takes_hooks(optimizer):
        yield f"never called Optimizer.__init__, so its steps run no hooks. Pass its inner {kind} here."
        return
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if keys := [key for key in optimizer.state if not isinstance(key, torch.Tensor)]:
        yield f"has state for {keys[0]!r}, which is not a parameter. Keep it in an attribute, or {_FIRST}"
        return
    if foreign := [parameter for parameter in [*held, *optimizer.state] if id(parameter) not in names]:
        several = any(id(parameter) in names for parameter in held)
        yield (
            f"holds {len(foreign)} parameters (of {len(held)}) that are not this model's, the first of shape "
            f"{tuple(getattr(foreign[0], 'shape', ()))}; "
            + (
                "prepare the models that it trains as one: nn.ModuleList([model, other])."
                if several
                else "build it from this model's parameters, before the model is prepared."
            )
        )
        return
    if held and idle:
        yield (
            f"holds only frozen parameters ({len(held)}), while others of the model are trainable, so it "
            "would update nothing. Build it after freezing, from the parameters with requires_grad."
        )
        return
    if faults := [*_step_faults(optimizer, names, plain, losses)]:
        yield from faults
        return
    followed = {id(group["params"]) for group in optimizer.param_groups}
    for inner in inside:
        apart = [
            p for group in inner.param_groups if id(group["params"]) not in followed for p in group["params"]
        ]
        own = [] if inner.state is optimizer.state else list(inner.state)
        if lost := [names[id(p)] for p in [*apart, *own] if id(p) in names and names[id(p)] not in plain]:
            yield (
                f"holds {type(inner).__name__} with {'groups' if apart else 'state'} of its own, which "
                f"cannot follow the sharded parameters ({listed(lost, 4)}). Build the wrapper after the "
                "model is prepared, or let it share the param_groups and the state of the inner optimizer."
            )
            return
    for one in (optimizer, *inside):
        if fault := _kept_apart(one, names, plain):
            yield fault
            return
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if fault := _state_fault(value, parameter, names[id(parameter)] in plain):
                yield f"state {key!r} of {names[id(parameter)]}: {fault}"


def _kept_apart(optimizer: Optimizer, names: Mapping[int, str], plain: Mapping[str, str]) -> str | None:
    """What it keeps outside of its state, in an attribute or a group, and for the old parameters only."""
    groups = optimizer.param_groups
    followed = {id(group["params"]) for group in groups}
    sharded = [p for group in groups for p in group["params"] if names.get(id(p), "") not in {"", *plain}]
    ids, shapes = set(map(id, sharded)), {one.shape for one in sharded}
    places = [(f"attribute {key!r}", one) for key, one in vars(optimizer).items() if key not in _FOLLOWED]
    places += [(f"group key {key!r}", one) for group in groups for key, one in group.items()]
    for place, value in places:
        if id(value) in followed or isinstance(value, torch.Tensor):
            continue
        tensors = [*tensors_in(value)]
        if any(id(one) in ids for one in tensors):
            return f"keeps parameters in its {place}, which would stay the ones before sharding. {_AFTER}"
        if tensors and all(one.shape in shapes for one in tensors):
            return (
                f"keeps tensors of its parameters' shapes in its {place}, which cannot be sharded. {_AFTER}"
            )
    return None


_FOLLOWED = {"param_groups", "state", "defaults"}
_FIRST = "prepare the model before the first step."
_AFTER = "Build it after the model is prepared, or let it keep them in state[parameter]."


def check_steps(model: nn.Module, sizes: Mapping[str, int]) -> None:
    """Refuse steps of optimizers, also of those made later, that torch cannot do on a prepared model."""
    losses = _losses(sizes)

    def check(model: nn.Module, optimizer: Optimizer) -> None:
        named = {canonical_name(name): parameter for name, parameter in model.named_parameters()}
        plain = {name for name, parameter in named.items() if not isinstance(parameter, DTensor)}
        with Faults(f"{type(optimizer).__name__} ") as faults:
            faults += _step_faults(optimizer, {id(p): name for name, p in named.items()}, plain, losses)

    before_every_step(model, check)


def _losses(sizes: Mapping[str, int]) -> int:
    """The number of ranks with batches of their own."""
    return math.prod(size for dimension, size in sizes.items() if dimension != "tp")


def _step_faults(
    optimizer: Optimizer, names: Mapping[int, str], plain: Collection[str], losses: int
) -> Iterator[str]:
    """Why a known kind of optimizer cannot step on parameters of one model, whose names are `names`."""
    kinds = [cls.__name__ for cls in type(optimizer).__mro__ if cls.__module__.startswith(_KNOWN)]
    ndim, why = next((_UNABLE[kind] for kind in kinds if kind in _UNABLE), (math.inf, ""))
    sparse = "SparseAdam" in kinds
    dense = sparse and losses > 1 and any(name not in plain for name in names.values())
    groups = [[p for p in group["params"] if id(p) in names] for group in optimizer.param_groups]
    held = [p for group in groups for p in group]
    if unable := [n for p in held if p.ndim >= ndim and ((n := names[id(p)]) not in plain or dense)]:
        inside = inner_optimizers(optimizer)
        others = "Use another optimizer" + (", or DDP." if sparse else _OR_WHOLE)
        whose = "sharded" if set(unable).difference(plain) else "replicated"
        yield (
            f"cannot step on {whose} parameters ({listed(unable, 4)}): {why}. "
            + (f"Use {type(inside[0]).__name__} itself." if inside else others)
        )
    elif held and "LBFGS" in kinds and losses > 1:
        yield (
            "takes its number of iterations from the loss of the rank's own batch, so the ranks would wait "
            "for each other. Use another optimizer."
        )
    for number, (group, options) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        mode = next((mode for mode in ("foreach", "fused") if options.get(mode)), None)
        trained = [p for p in group if p.requires_grad]
        cut = [names[id(p)] for p in trained if names[id(p)] not in plain]
        whole = [names[id(p)] for p in trained if names[id(p)] in plain]
        if mode == "fused" and cut and _UNFUSED.intersection(kinds):
            yield (
                f"group {number} has fused=True, for which DTensor (torch 2.13) has no operation, and "
                f"sharded parameters ({listed(cut, 4)}); leave fused out."
            )
        elif mode and cut and whole:
            yield (
                f"group {number} has {mode}=True but would mix sharded parameters with the replicated "
                f"{listed(whole, 4)}; put those in a separate group, or leave {mode} out."
            )


def check_refills(optimizers: Sequence[Optimizer], structure: Structure, init: frozenset[str]) -> None:
    """Raise a ParallelismValueError for state on the meta device that cannot be initialized.

    Only Adagrad makes its state at construction, with a known value.
    """
    names = names_by_id(structure)
    after = ": its parameter is on the meta device, without values. Prepare the model before the first step."
    with Faults(after=after, between="; ") as faults:
        faults += [
            f"{type(optimizer).__name__} state {key!r} of {names[id(parameter)]}"
            for optimizer in optimizers
            for parameter, state in optimizer.state.items()
            for key, value in state.items()
            if isinstance(value, torch.Tensor)
            and names[id(parameter)] in init
            and not is_made_at_construction(optimizer, key, value)
        ]


def forgotten_optimizers(optimizers: Sequence[Optimizer], structure: Structure) -> list[str]:
    """Warnings of optimizers in this process that hold the model's parameters but were not passed.

    They would update the old parameters. They are found by the garbage collector, so some may be unused.
    """
    if not (kinds := _torch.classes_of_optimizers()):
        return []
    names = names_by_id(structure)
    known = {id(one) for optimizer in optimizers for one in [optimizer, *inner_optimizers(optimizer)]}
    known |= {
        id(optimizer.param_groups) for optimizer in optimizers
    }  # of Lightning's and accelerate's wrappers
    found = []
    # Objects refer to their classes; asking the collector for that takes half as long as a look at all types.
    for thing in [one for one in gc.get_referrers(*kinds) if type(one) in kinds]:
        # There are no groups if the construction failed, or in a class that combines other optimizers.
        groups = getattr(thing, "param_groups", [])
        held = [p for group in groups for p in group["params"] if id(p) in names]
        if held and known.isdisjoint(map(id, (thing, groups, *inner_optimizers(thing)))):
            found.append(
                f"{type(thing).__name__} holds {len(held)} parameters of this model, but was not passed, so "
                "it will update nothing. Pass it as optimizer=, or build it afterwards."
            )
    return found


def check_hooks(structure: Structure, plain: Mapping[str, str]) -> None:
    """Raise a ParallelismValueError for gradient hooks on parameters to be sharded, which FSDP2 drops."""
    sharded = ((name, held.get()) for name, held in structure.parameters.items() if name not in plain)
    if hooked := [name for name, parameter in sharded if _torch.gradient_hooks(parameter)]:
        raise ParallelismValueError(
            f"Gradient hooks (Tensor.register_hook) on {', '.join(hooked)} cannot be kept, because gradients "
            "are reduced and sharded. Use register_post_accumulate_grad_hook, or leave the modules whole: "
            "Rule(..., shard=False)."
        )


def _state_fault(value: Any, parameter: torch.Tensor, whole: bool) -> str | None:
    if value is None or isinstance(value, (bool, int, float)):
        return None
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__} cannot be sharded; {_FIRST}"
    if value.ndim == 0:
        return None
    if codec_of(value) is not None:
        return f"a {type(value).__name__} is quantized as a whole; {_FIRST}"
    have, want = tuple(value.shape), tuple(parameter.shape)
    matches = len(have) == len(want) and all(h in (w, 1) for h, w in zip(have, want, strict=True))
    if (matches or whole) and not isinstance(value, DTensor):
        return None
    return f"shape {have} does not follow from the parameter's {want}, so it cannot be sharded; {_FIRST}"
