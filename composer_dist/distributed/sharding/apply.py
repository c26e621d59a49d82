"""Tensor parallelism and FSDP2 from the plan.

Sharding happens on the meta device, on every rank alike: each parameter is first replaced by a
shadow without storage, matrices are cut among the tensor-parallel ranks, the units are sharded from the
outermost inwards, and only then do the shards get memory (`weights/storage.py`). So no rank needs more
than its shards, the full tensors stay where they were until they have been delivered, and the layout of a
parameter in memory (a transposed view, say) does not matter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from composer_dist import _torch
from composer_dist.distributed.forwards import call_through
from composer_dist.distributed.mesh.mesh import Mesh
from composer_dist.distributed.plan.plan import ParallelPlan
from composer_dist.distributed.sharding.hooks import own_outputs, reshard_after_evaluation
from composer_dist.distributed.sharding.order import check_call_order
from composer_dist.distributed.sharding.plan import Unit
from composer_dist.distributed.sharding.skip import let_skip
from composer_dist.distributed.tensor_parallel.apply import apply_tensor_parallel
from composer_dist.errors import ParallelismRuntimeError
from composer_dist.structure.names import ancestors
from composer_dist.structure.structure import Held, Structure
from composer_dist.tensors.inner import empty_like


def check_offload(plan: ParallelPlan) -> None:
    """Refuse pinned memory where no accelerator can pin it.

    Raises:
        ParallelismRuntimeError: a unit insists on pinned memory and there is no accelerator.
    """
    pinned = [unit.name or "the root" for unit in plan.units if unit.offload == "pinned"]
    if pinned and not torch.accelerator.is_available():
        raise ParallelismRuntimeError(
            f"cpu_offload='pinned' (unit {pinned[0]}) needs an accelerator to pin memory for, and this "
            "machine has none; use cpu_offload=True, which pins only where it can."
        )


def shard(structure: Structure, plan: ParallelPlan, mesh: Mesh) -> dict[str, torch.Tensor]:
    """Shard a model's parameters as planned, on the meta device; `weights.storage` gives them memory.

    Args:
        structure: the model's.
        plan: made for this structure.
        mesh: the whole one.

    Returns:
        The parameters as they were before, by first name.
    """
    tensor_parallel = plan.tensor_parallel
    names = [name for unit in plan.units for name in unit.parameters]
    names += [] if tensor_parallel is None else tensor_parallel.parameters
    managed = {name: structure.tensors[name] for name in names}
    originals = {name: held.get() for name, held in managed.items()}
    for held in managed.values():
        held.put(_shadow(held))
    if tensor_parallel is not None and mesh.tp is not None:
        apply_tensor_parallel(structure, tensor_parallel, mesh.tp)
    for unit in plan.units:
        _shard_unit(unit, structure, mesh.fsdp or mesh.device_mesh)
    for unit in plan.units:
        known = fsdp_params_by_place(structure.modules[unit.name])
        for name in unit.parameters:
            if managed[name].info.inner:
                param = next(known[place.key_of] for place in managed[name].places if place.key_of in known)
                rows = _torch.padded_shard(param)[0][0]
                _torch.adopt_shard(
                    param, empty_like(originals[name], "meta", originals[name].shape[0] // rows)
                )
    return originals


def fsdp_params_by_place(module: nn.Module) -> dict[tuple[int, str], Any]:
    """FSDP2's own record of each parameter of the unit that `module` leads, by where it is held."""
    found = {}
    for param in _torch.fsdp_params(module) if isinstance(module, FSDPModule) else ():
        owner, key = _torch.fsdp_param_place(param)
        found[id(owner), key] = param
    return found


def pins_memory(unit: Unit) -> bool:
    """Whether a unit's shards lie in pinned host memory."""
    return unit.offload == "pinned" or (unit.offload == "auto" and torch.accelerator.is_available())


def _shadow(held: Held) -> nn.Parameter:
    """A parameter on the meta device, contiguous, like `held` in everything that FSDP2 looks at."""
    empty = torch.empty(held.info.shape, dtype=held.info.dtype, device="meta")
    return nn.Parameter(empty, requires_grad=held.info.requires_grad)


def _shard_unit(unit: Unit, structure: Structure, mesh: DeviceMesh) -> None:
    modules = [structure.modules[name] for name in unit.modules]
    mine = {structure.tensors[name].get() for name in unit.parameters}
    others = {p for module in modules for p in module.parameters() if p not in mine}
    offload = CPUOffloadPolicy(pin_memory=pins_memory(unit)) if unit.offload else OffloadPolicy()
    fully_shard(
        modules if len(modules) > 1 else modules[0],
        mesh=mesh,
        reshard_after_forward=unit.reshard_after_forward,
        mp_policy=unit.mp_policy,
        offload_policy=offload,
        ignored_params=others,
    )


def hook_units(structure: Structure, plan: ParallelPlan, mesh: Mesh) -> None:
    """What this library adds around the units' calls and collectives; see each function."""
    if plan.sharding is None:
        return
    units = [(unit, structure.modules[unit.name]) for unit in plan.units]
    compiled = {one.module for one in plan.compiled}
    for unit, module in units:
        for name in unit.modules:
            traced = any(above in compiled for above in ancestors(name) if above != name)
            own_outputs(structure.modules[name], traced)
            call_through(structure.modules[name], plan.sharding.forward_methods)
        single = isinstance(module, FSDPModule) and len(unit.modules) == 1
        if single and unit.reshard_after_forward is not True:
            reshard_after_evaluation(module)  # type: ignore[arg-type]
    if mesh.fsdp is None:
        return
    let_skip(structure, plan.sharding.skippable, [n for u in plan.units for n in u.modules], mesh.fsdp)
    if plan.sharding.check_order:
        check_call_order({unit.name: module for unit, module in units})


def finish(structure: Structure, plan: ParallelPlan) -> None:
    """Let FSDP2 run its own final checks now, from the outermost units."""
    for unit in plan.units:
        module = structure.modules[unit.name]
        if isinstance(module, FSDPModule) and len(unit.modules) == 1:
            _torch.finish_lazily(module)
