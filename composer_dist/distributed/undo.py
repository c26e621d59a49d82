"""The way back: a prepared model becomes what it was before, with the values that it has now."""

import gc
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composer_dist import _torch
from composer_dist.distributed.before_steps import end_checks
from composer_dist.distributed.former import prepared_models
from composer_dist.distributed.moving.gather import gather, gather_each
from composer_dist.distributed.optimizers.check import forgotten_optimizers
from composer_dist.distributed.optimizers.follow import is_low_bit, low_bit_state, names_by_id
from composer_dist.distributed.optimizers.steps import watch_steps
from composer_dist.distributed.plan.build import as_tuple
from composer_dist.distributed.prepared import (
    check_usable,
    follow_buffers,
    of,
    prepared_mesh,
    reshard,
    usable_or_marked,
)
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.distributed.restore import Changes
from composer_dist.distributed.training.local_gradients import waiting_of
from composer_dist.distributed.weights.storage import replace
from composer_dist.errors import Faults, ParallelismRuntimeError, ParallelismValueError
from composer_dist.structure.structure import Structure, read_structure
from composer_dist.tensors.inner import as_floats, encode_into
from composer_dist.tensors.nested import map_tensors, named_tensors
from composer_dist.users_code import warn
from composer_dist.wording import listed


def unparallelize_model(model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> None:
    """Undo `parallelize_model`, in place: the model is a plain one again, with the values that it has now.

    Modules have their own classes, forwards, attributes and names again, and no hooks of this library or of
    torch's FSDP2 and DDP. Every rank gets the whole value of every tensor, of every gradient, and of the
    optimizers' state, on the device of its part. Ties, `requires_grad`, attributes of parameters and the
    user's hooks stay; sharded parameters become new objects. Afterwards `parallelize_model` can prepare the
    model again, with any configuration.

    All ranks of the model's mesh call it together. Afterwards every rank holds the whole model, gradients
    and state. Tensors are gathered in buckets: in addition to what it holds before and afterwards, a rank
    needs memory for one bucket and for its part of it. A bucket is as large as the largest tensor, at least
    1 MiB and at most 256 MiB. 8-bit and 4-bit state, which each rank has quantized for its part, is
    dequantized, and quantized again as a whole.

    Args:
        model: prepared by `parallelize_model`, `parallelize_composer_model` or `prepare_fully_shard`, or a
            module that contains such models.
        optimizer: one or several that hold the model's parameters; afterwards they hold the whole ones, in
            the same groups, with their state. Others, built before, would update nothing.

    Raises:
        ParallelismValueError: the model is not prepared; an optimizer holds parameters that are not its own;
            or a parameter was a DTensor before the preparation. Nothing is changed.
        ParallelismRuntimeError: gradients wait for a backward outside of `no_sync`, or other code has changed
            a forward or a class since the preparation; nothing is changed. Or a rank is lost; the model
            is unusable then.
    """
    check_usable(model)
    mesh = prepared_mesh(model)
    if mesh is None:
        raise ParallelismValueError(
            f"This {type(model).__name__} is not prepared, so there is nothing to undo. Pass the model that "
            "parallelize_model has prepared."
        )
    agreement = Agreement(mesh.ranks)
    with agreement.together("the model to undo"):
        optimizers = as_tuple(optimizer)
        reshard(model)
        structure = read_structure(model)
        _check(model, structure, optimizers)
        mine = _facts(structure, optimizers)
    agreement.reach("the tensors to gather", mine, _check_same)
    if any(isinstance(held.get(), DTensor) for held in structure.parameters.values()):
        for warning in forgotten_optimizers(optimizers, structure):
            warn(warning)
    with usable_or_marked(model, agreement=agreement):
        agreement.collectively("the end of features", lambda: _end(model))
        with agreement.together("the modules"):
            for changes in _changes(model):
                changes.put_back()
            structure = read_structure(model)
        agreement.collectively("the whole tensors", lambda: _make_whole(model, structure, optimizers))
    gc.collect()  # FSDP2's records refer to each other, and to the shards


def _changes(model: nn.Module) -> list[Changes]:
    """What preparations have changed."""
    known = (of(module) for module in model.modules())
    return [one.changes for one in known if one is not None and one.changes is not None]


def _check(model: nn.Module, structure: Structure, optimizers: Sequence[Optimizer]) -> None:
    names = names_by_id(structure)
    with Faults() as faults:
        for optimizer in optimizers:
            held = [p for group in optimizer.param_groups for p in group["params"]]
            if foreign := [p for p in [*held, *optimizer.state] if id(p) not in names]:
                faults.append(
                    f"{type(optimizer).__name__} holds {len(foreign)} parameters that are not this model's, "
                    f"the first of shape {tuple(foreign[0].shape)}. Pass this model's own."
                )
        faults += [fault for one in _changes(model) for fault in one.user_cuts()]
    with Faults(kind=ParallelismRuntimeError) as faults:
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        waiting = [name for unit in units for name, _ in _torch.unreduced(unit)]
        if waiting := [*waiting, *waiting_of(held.get() for held in structure.parameters.values())]:
            faults.append(
                f"The gradients of {listed(waiting)} are not averaged over the ranks yet, because the "
                "last backward was inside of no_sync. Run the last one outside, or call zero_grad()."
            )
        faults += [fault for one in _changes(model) for fault in one.faults()]


def _facts(structure: Structure, optimizers: Sequence[Optimizer]) -> list[str]:
    """The sharded tensors, in the order in which they are gathered."""
    facts = []
    for name, held in structure.tensors.items():
        tensor = held.get()
        if isinstance(tensor, DTensor):
            facts.append(f"{name}{' and its gradient' if tensor.grad is not None else ''}")
    names = names_by_id(structure)
    for index, optimizer in enumerate(optimizers):
        for parameter, state in optimizer.state.items():
            keys = [key for key, value in named_tensors(state) if isinstance(value, DTensor)]
            facts += [f"optimizer {index}'s {key} of {names[id(parameter)]}" for key in keys]
    return facts


def _check_same(findings: Sequence[Sequence[str]]) -> None:
    for rank, facts in enumerate(findings):
        if facts != findings[0]:
            apart = sorted(set(facts).symmetric_difference(findings[0]))
            raise ParallelismRuntimeError(
                f"Rank {rank} would gather different tensors than rank 0: {listed(apart or facts)}. Every "
                "rank must have the same gradients and pass the same optimizers."
            )


def _end(model: nn.Module) -> None:
    follow_buffers(model)
    for module in model.modules():
        known = of(module)
        for end in [*known.ends] if known is not None else ():
            end()


def _make_whole(model: nn.Module, structure: Structure, optimizers: Sequence[Optimizer]) -> None:
    """Replace all parts."""
    cut = {name: held for name, held in structure.tensors.items() if isinstance(held.get(), DTensor)}
    old = {name: held.get() for name, held in cut.items()}
    whole: dict[str, Tensor] = {}
    gradients: dict[str, Tensor] = {}
    parts: list[tuple[Any, str, Tensor]] = []
    """Each with the dictionary and the key where the whole tensor belongs."""
    for name, part in old.items():
        parts.append((whole, name, part))
        if part.grad is not None:
            parts.append((gradients, name, part.grad))
            part.grad = None
    for state in (state for one in optimizers if not is_low_bit(one) for state in one.state.values()):
        parts += [(state, key, value) for key, value in state.items() if isinstance(value, DTensor)]
    places = [(held, key, part.device) for held, key, part in parts]
    parts.reverse()  # popping from the end of a list does not move the other entries
    for index, tensor in gather_each(parts.pop()[2] for _ in places):
        held, key, device = places[index]
        held[key] = tensor.to(device)
    new: dict[int, Tensor] = {}
    for name, one in cut.items():
        replace(one, whole.pop(name))
        new[id(old[name])] = one.get()
        one.get().grad = gradients.pop(name, None)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"][:] = [new.get(id(p), p) for p in group["params"]]
        states = dict(optimizer.state)
        optimizer.state.clear()
        for parameter, state in states.items():
            parameter = new.get(id(parameter), parameter)
            optimizer.state[parameter] = state
            for key, value in state.items():
                if is_low_bit(optimizer) and isinstance(value, DTensor):
                    state[key] = low_bit_state(optimizer, parameter, key)
                    encode_into(state[key], gather(as_floats(value)))
                else:
                    state[key] = map_tensors(lambda _, one: _whole(one), value)
    replaced = {name: part for name, part in old.items() if isinstance(part, nn.Parameter)}
    inside = set(model.modules())
    for each in [*(inner for inner in prepared_models() if inner in inside and inner is not model), model]:
        end_checks(each)
        watch_steps(each, replaced if each is model else {})


def _whole(tensor: Tensor) -> Tensor:
    """A tensor's whole value, on the device of its part; a plain tensor itself."""
    return gather(tensor).to(tensor.device) if isinstance(tensor, DTensor) else tensor
