"""Steps of optimizers that would silently do nothing, or half of what they should."""

from collections.abc import Iterable, Mapping, Sequence, Set
from functools import cache, partial, wraps
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composer_dist import _torch
from composer_dist.distributed.before_steps import Check, before_every_step
from composer_dist.distributed.former import (
    Former,
    former_parameters,
    prepared_models,
    remember,
    when_replaced,
)
from composer_dist.distributed.optimizers.follow import is_whole
from composer_dist.distributed.prepared import of, record
from composer_dist.distributed.ranks.process_group import device_for_facts
from composer_dist.distributed.training.average_gradients import groups_of
from composer_dist.errors import Faults, ParallelismRuntimeError
from composer_dist.structure.structure import Structure
from composer_dist.tensors.fingerprint import fingerprint
from composer_dist.wording import listed


def watch_steps(model: nn.Module, replaced: Mapping[str, Tensor]) -> None:
    """Look at every step of every optimizer of this process while `model` exists; torch's own become faster.

    Args:
        model: prepared.
        replaced: the parameters, by name, that the model had before.
    """
    before_every_step(model, partial(_choose, remember(model, replaced)))
    _torch.step_on_parts()
    _watch_zero_grad()
    _known[model] = [ref(module) for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in _units(model):
        _torch.drop_with_gradients(unit)


@cache
def _watch_zero_grad() -> None:
    """Have every `zero_grad` also drop the whole gradients that FSDP2 keeps after `no_sync`.

    They are not in `.grad`, and torch has no hooks there, so this replaces the methods of all optimizers and
    modules.
    """
    of_optimizer, of_module = Optimizer.zero_grad, nn.Module.zero_grad

    @wraps(of_optimizer)
    def zero_optimizer(self: Optimizer, set_to_none: bool = True) -> None:
        _drop_whole(p for group in self.param_groups for p in group["params"] if isinstance(p, DTensor))
        of_optimizer(self, set_to_none)

    @wraps(of_module)
    def zero_module(self: nn.Module, set_to_none: bool = True) -> None:
        _drop_whole(self.parameters())
        of_module(self, set_to_none)

    Optimizer.zero_grad = zero_optimizer  # type: ignore[method-assign]
    nn.Module.zero_grad = zero_module  # type: ignore[method-assign]


def _drop_whole(parameters: Iterable[Tensor]) -> None:
    if _torch.any_unreduced() and (held := set(map(id, parameters))):
        for unit in [unit for model in prepared_models() for unit in _units(model)]:
            _torch.drop_unreduced(unit, held)


def _units(model: nn.Module) -> list[FSDPModule]:
    return [unit for one in _known[model] if (unit := one()) is not None]


_known: WeakKeyDictionary[nn.Module, list[ref[FSDPModule]]] = WeakKeyDictionary()
"""The units of each prepared model."""


def check_former(structure: Structure) -> None:
    """Raise a ParallelismValueError for parameters shared with a model that was prepared before."""
    with Faults() as faults:
        there = {id(one): name for name, one in former_parameters()}
        for name, held in structure.parameters.items():
            if id(held.get()) in there:
                faults.append(
                    f"{name} was also {there[id(held.get())]} of a model that is prepared, and is replaced "
                    "there, so the two would no longer be one. Prepare both models as parts of one module."
                )


def _choose(former: Former, model: nn.Module, optimizer: Optimizer) -> Check[nn.Module] | None:
    held = {id(one): one for group in optimizer.param_groups for one in group["params"]}
    found = [(name, one) for each in former for name, one in each.items() if id(one) in held]
    if not found:
        _check_apart(model, held)
    shards = [param.sharded_param for unit in _units(model) for param in _torch.fsdp_params(unit)]
    shards += [one for one in model.parameters() if isinstance(one, DTensor)]  # of tensor parallelism alone
    mine = set(map(id, shards)) & held.keys()
    return partial(_before_step, found, mine) if found or mine else None


def _check_apart(model: nn.Module, held: Mapping[int, Tensor]) -> None:
    """Refuse gradients that differ between ranks, of parameters of no prepared model: nothing averages them.

    An optimizer that holds some of `model` too does the same steps on all ranks, so they can compare.
    """
    apart = {key: one for key, one in held.items() if one.requires_grad and not isinstance(one, DTensor)}
    mesh = None if (known_as := of(model)) is None else known_as.mesh
    if not apart or mesh is None or held.keys().isdisjoint(map(id, model.parameters())):
        return
    for prepared in prepared_models():
        for parameter in prepared.parameters():
            apart.pop(id(parameter), None)
    if not apart:
        return
    grads = [one.grad for one in apart.values()]
    mine = torch.tensor([0 if grad is None else fingerprint(grad.to_dense()) >> 1 for grad in grads])
    extremes = torch.stack([mine, -mine])
    for group in groups_of(mesh.fsdp) if mesh.fsdp else ():
        extremes = extremes.to(device_for_facts(group))
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group)
    totals = extremes.sum(0).tolist()
    if differ := [tuple(p.shape) for p, total in zip(apart.values(), totals, strict=True) if total]:
        raise ParallelismRuntimeError(
            f"The optimizer holds {len(differ)} parameters of no prepared model, the first of shape "
            f"{differ[0]}. Their gradients are not averaged and differ between ranks. Make their module "
            "and the model parts of one module and prepare that, or average the gradients before each step. "
            "If each rank should have its own, give them an optimizer of their own."
        )


def _before_step(
    former: Sequence[tuple[str, Tensor]], mine: Set[int], model: nn.Module, optimizer: Optimizer
) -> None:
    if old := {name: one for name, one in former if one.grad is None}:
        when = when_replaced(old.values())
        raise ParallelismRuntimeError(
            f"{type(optimizer).__name__} holds {listed(list(old))} from before {when}, which the model no "
            "longer has, so it would update nothing. Pass it as optimizer=, or build it from "
            f"model.parameters() after {when}."
        )
    units = _units(model)
    if waiting := [name for unit in units for name, one in _torch.unreduced(unit) if id(one) in mine]:
        raise ParallelismRuntimeError(
            f"The optimizer would step without the gradients of {listed(waiting)}: they are not reduced over "
            "the ranks yet, because the last backward was inside of no_sync. Run the last one outside of it."
        )
    if optimizer.state and mine:
        _check_state(optimizer, mine)
    for unit in units:
        if _torch.has_gathered(unit):
            unit.reshard()  # a forward without a backward has left it gathered, with the old values
    if mine:
        record(model).steps += 1


def _check_state(optimizer: Optimizer, mine: Set[int]) -> None:
    """Refuse the state of a whole model, by a look at the first shard that has a state."""
    held = (one for group in optimizer.param_groups for one in group["params"])
    shard = next((one for one in held if id(one) in mine and one in optimizer.state), None)
    if shard is None:
        return
    for key, value in optimizer.state[shard].items():
        if is_whole(value, shard):
            raise ParallelismRuntimeError(
                f"{key} of the state of {type(optimizer).__name__} is a whole tensor, but its parameter is "
                "sharded. Call load_full_optimizer_state(model, optimizer, state) on all ranks instead of "
                "optimizer.load_state_dict(state)."
            )
