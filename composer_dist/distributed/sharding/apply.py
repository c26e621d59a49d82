"""FSDP2 from the plan.

Every rank shards the model on the meta device: it replaces each parameter that tensor parallelism has not cut
by one without storage, shards the units from the outermost inwards, and then allocates the shards
(`weights/storage.py`). A rank therefore needs memory only for its shards, the full tensors stay where they
are until they are delivered, and a parameter may have any memory layout (such as a transposed view).
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import ParametrizationList

from composer_dist import _torch
from composer_dist.distributed.forwards import call_through, is_compiled
from composer_dist.distributed.mesh.mesh import Mesh
from composer_dist.distributed.prepared import record
from composer_dist.distributed.sharding.buffers import FollowBuffers
from composer_dist.distributed.sharding.calls import Calls
from composer_dist.distributed.sharding.check_order import check_call_order
from composer_dist.distributed.sharding.explain import refused
from composer_dist.distributed.sharding.generation import check_generation
from composer_dist.distributed.sharding.hooks import (
    normalize_in_own_dtype,
    own_outputs,
    parametrize_in_own_dtype,
    reshard_after_evaluation,
)
from composer_dist.distributed.sharding.plan import ShardingPlan, Unit
from composer_dist.distributed.sharding.skip import let_skip
from composer_dist.distributed.training.average_gradients import average_plain_gradients
from composer_dist.structure.names import ancestors
from composer_dist.structure.structure import Structure
from composer_dist.tensors.inner import empty_like

_SCALAR = (
    "item(), float(), int() or bool() of a sharded tensor would give this rank's part of the value: the norm "
    "of a sharded parameter, say, is not reduced over the ranks yet. Call full_tensor() first, on all ranks."
)
_PART = (
    "A write into a part of a sharded tensor (tensor[i], tensor[i:j]) along its sharded dimension would be "
    "lost: the part is a gathered copy. Change parameters inside of summon_full_params(model, "
    "writeback=True), and gradients by a mask: gradient.mul_(distribute_tensor(mask, gradient.device_mesh, "
    "gradient.placements))."
)
_EVERYWHERE = (
    "{}() of a sharded tensor would write the same numbers into the part of every rank (random ones only on "
    "CPUs). Initialize the model before the preparation, pass param_init_fn, or do it inside of "
    "summon_full_params(model, writeback=True)."
)
_DATA = (
    "A new value set through .data of a sharded tensor would be lost, because a DTensor keeps the part that "
    "it has. Change its values in place, by tensor.data.copy_(value), or in summon_full_params(model): "
    "peft's merge_adapter() works there."
)
_SHARED = (
    "A sharded tensor cannot share its memory with other processes: torch would crash. Call "
    "model.share_memory() on a copy that is not prepared, which full_state_dict can fill."
)
_WHOLE = (
    "{}() of a sharded parameter or gradient cannot use a whole tensor. Shard it too: "
    "distribute_tensor(tensor, gradient.device_mesh, gradient.placements)."
)
_PRUNED = (
    "torch.nn.utils.prune cannot change {}, because it is sharded. Prune the model before the preparation; "
    "to prune it now, or to remove a pruning, call unparallelize_model(model) first."
)
_SENT = (
    "torch.distributed's {} cannot use sharded tensors: their parts differ between ranks. FSDP2 keeps the "
    "ranks equal without PostLocalSGDOptimizer and model averagers; give collectives of your own "
    "full_tensor() or to_local()."
)


def apply(structure: Structure, plan: ShardingPlan | None, mesh: Mesh) -> dict[str, torch.Tensor]:
    """Shard a model's parameters on the meta device; `weights.storage` allocates them.

    Returns:
        The parameters before sharding, by first name, without those that tensor parallelism has cut.
    """
    units = plan.units if plan else ()
    held = {name: structure.tensors[name] for unit in units for name in unit.parameters}
    uncut = {name: one for name, one in held.items() if not isinstance(one.get(), DTensor)}
    originals = {name: one.cast_shadow() for name, one in uncut.items()}
    with _torch.cheap_shards():
        for unit in units:
            _shard_unit(unit, structure, mesh.fsdp or mesh.device_mesh)
    for unit in units:
        known = fsdp_params_by_place(structure.modules[unit.name])
        for name in unit.parameters:
            if held[name].info.inner:
                param = next(known[place.key_of] for place in held[name].places if place.key_of in known)
                rows = _torch.padded_shard(param)[0][0]
                meta = empty_like(originals[name], "meta", originals[name].shape[0] // rows)
                _torch.adopt_shard(param, meta)
    return originals


def fsdp_params_by_place(module: nn.Module) -> dict[tuple[int, str], Any]:
    """FSDP2's record of each parameter of the unit that `module` leads, by the parameter's place."""
    found = {}
    for param in _torch.fsdp_params(module) if isinstance(module, FSDPModule) else ():
        owner, key = _torch.fsdp_param_place(param)
        found[id(owner), key] = param
    return found


def _shard_unit(unit: Unit, structure: Structure, mesh: DeviceMesh) -> None:
    modules = [structure.modules[name] for name in unit.modules]
    mine = {structure.tensors[name].get() for name in unit.parameters}
    others = {p for module in modules for p in module.parameters() if p not in mine}
    calls = [Calls(name, module) for name, module in zip(unit.modules, modules, strict=True)]
    fully_shard(
        modules if len(modules) > 1 else modules[0],
        mesh=mesh,
        reshard_after_forward=unit.reshard_after_forward,
        mp_policy=unit.mp_policy,
        offload_policy=CPUOffloadPolicy(unit.offload == "pinned") if unit.offload else OffloadPolicy(),
        ignored_params=others or None,  # with None, torch looks at fewer modules
    )
    known = fsdp_params_by_place(modules[0])
    places = {name: [place.key_of for place in structure.tensors[name].places] for name in unit.parameters}
    params = {name: known[key] for name, keys in places.items() for key in keys if key in known}
    for call in calls:
        call.around(params)


def arm(structure: Structure, plan: ShardingPlan | None, mesh: Mesh) -> None:
    """Add this library's hooks to the units' calls and collectives."""
    if plan is None:
        return
    record(structure.modules[""]).state_dict_type = plan.state_dict_type
    average_plain(structure, mesh.fsdp)
    _torch.refuse_local_scalars(_SCALAR)
    _torch.refuse_lost_writes(_PART, _EVERYWHERE, _DATA, _SHARED, _SENT, _WHOLE)
    _torch.reduce_exactly()
    shards = (structure.tensors[name].get() for unit in plan.units for name in unit.parameters)
    _torch.average_gradients_of_whole(one.device_mesh for one in shards if isinstance(one, DTensor))
    _torch.check_scaled_gradients()
    _torch.explain_in_backward(refused)
    _torch.forget_failed_iterations(structure.modules[""])
    _torch.refuse_pruning(_PRUNED)
    units = {unit.name: structure.modules[unit.name] for unit in plan.units}
    inside = [name for unit in plan.units for name in unit.modules]
    for name in inside:
        outer = [above for above in ancestors(name) if above != name]
        own_outputs(structure.modules[name], any(is_compiled(structure.modules[above]) for above in outer))
        call_through(structure.modules[name], plan.forward_methods)
    for unit in plan.units:
        module = units[unit.name]
        if isinstance(module, FSDPModule):
            _torch.guard_backward(module)
        single = isinstance(module, FSDPModule) and len(unit.modules) == 1
        if single and unit.reshard_after_forward is not True:
            reshard_after_evaluation(module)  # type: ignore[arg-type]
        if unit.mp_policy.param_dtype is not None:
            _compute_in_own_dtype(structure, unit, mesh.device_type)
    if mesh.fsdp is None:
        return
    check_generation(structure.modules[""])
    FollowBuffers(structure, mesh.fsdp)
    let_skip(structure, plan.skippable, inside, mesh.fsdp)
    if plan.check_order or (mesh.device_type == "cpu" and mesh.fsdp.size() > 1):
        check_call_order(units, record(structure.modules[""]), mesh.fsdp, always=plan.check_order)


def _compute_in_own_dtype(structure: Structure, unit: Unit, device_type: str) -> None:
    """Have what computes with buffers, which FSDP2 does not cast, do so in their dtype."""
    owners = [place.module for name in unit.parameters for place in structure.tensors[name].places]
    for owner in dict.fromkeys(owners):
        is_norm = isinstance(owner, _torch.AnyBatchNorm) and owner.running_mean is not None
        if is_norm and device_type == "cpu":
            normalize_in_own_dtype(owner)
        elif isinstance(owner, ParametrizationList):
            for parametrization in owner:
                parametrize_in_own_dtype(parametrization)


def average_plain(
    structure: Structure, mesh: DeviceMesh | None, filled: Collection[str] | None = None
) -> None:
    """Average the gradients of parameters that stay whole, while they are trainable, once all have values.

    Args:
        filled: the tensors that just got their values; None means all.
    """
    plain = {
        name: held.get() for name, held in structure.parameters.items() if not isinstance(held.get(), DTensor)
    }
    new = plain if filled is None else plain.keys() & set(filled)
    if mesh is not None and new and not any(parameter.is_meta for parameter in plain.values()):
        average_plain_gradients(structure.modules[""], plain, mesh)  # type: ignore[arg-type]


def finish(structure: Structure, plan: ShardingPlan | None) -> None:
    """Make FSDP2 run its final checks now, outer units first."""
    for unit in plan.units if plan else ():
        module = structure.modules[unit.name]
        if isinstance(module, FSDPModule) and len(unit.modules) == 1:
            _torch.finish_lazily(module)
