"""The recipe's steps one by one, for those who write a recipe of their own.

`parallelize_model` needs none of them. They follow Composer's: shard a model with
`prepare_fully_shard`, then fill it with `meta_init` or `sync_module_states`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composer_dist import _torch
from composer_dist.distributed import process_group
from composer_dist.distributed.agreement import Agreement
from composer_dist.distributed.aliases import Held, Structure, read_structure
from composer_dist.distributed.config import FSDP2Config, ParallelismConfig, resolve_config
from composer_dist.distributed.initialize import InitFn, find_components, replace, run_component
from composer_dist.distributed.mesh import mesh_for
from composer_dist.distributed.plan import ParallelPlan, build_plan
from composer_dist.distributed.policies import WrapPolicy
from composer_dist.distributed.sharding import check_offload, fsdp_params_by_place, shard
from composer_dist.distributed.sync import Cargo, deliver, device_of, take_slice
from composer_dist.errors import ParallelismKeyError, ParallelismValueError
from composer_dist.precision import Precision


@contextmanager
def init_context(empty: bool = True, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Build models without memory, in a dtype of choice.

    Args:
        empty: parameters and buffers made inside are on the meta device.
        dtype: their floating-point dtype; None leaves the default.
    """
    before = torch.get_default_dtype()
    try:
        if dtype is not None:
            torch.set_default_dtype(dtype)
        with torch.device("meta") if empty else nullcontext():
            yield
    finally:
        torch.set_default_dtype(before)


def meta_init(module: nn.Module, param_init_fn: InitFn | None = None) -> None:
    """Initialise every tensor of `module` that is on the meta device, in place.

    In one process on an unsharded module this is the reference for `parallelize_model`, which gives the
    same bits on any number of ranks for the same `torch.initial_seed()`, device type and torch
    version. On a module sharded by `prepare_fully_shard` each rank computes every tensor in full, one
    component after the other, and keeps its rows; seed all ranks alike. The random state afterwards is
    as it was before.

    Args:
        param_init_fn: called with each module that holds a meta tensor directly; None looks for
            `param_init_fn` on the module and its ancestors, then for `reset_parameters`.

    Raises:
        ParallelismValueError: tensors that no initialiser writes, with their modules' classes.
    """
    structure = read_structure(module)
    needed = {name for name, held in structure.tensors.items() if held.get().is_meta}
    sharded = next(
        (h.get() for h in structure.tensors.values() if isinstance(h.get(), DTensor)), None
    )
    device = torch.get_default_device() if sharded is None else device_of(sharded.device_mesh)
    real = {
        name: held.get()
        for name, held in structure.tensors.items()
        if name not in needed and not isinstance(held.get(), DTensor)
    }
    for component in find_components(structure, needed, param_init_fn):
        values = run_component(component, structure, torch.initial_seed(), device, real)
        for name in needed.intersection(component.tensors):
            _put(module, structure.tensors[name], values[name])


def prepare_fully_shard(
    model: nn.Module,
    fsdp2_config: FSDP2Config | ParallelismConfig | Mapping[str, object] | str,
    precision: str | Precision | None = None,
    auto_wrap_policy: WrapPolicy | None = None,
) -> ParallelPlan:
    """Plan and shard `model` in place; every rank keeps its rows of its own values.

    What is on the meta device stays there, as meta shards. Nothing is synchronised between ranks.

    Raises:
        ParallelismError: as `plan_parallelism`; the same on every rank.
    """
    process_group.init(reuse=True)
    config = resolve_config(fsdp2_config)
    mesh = mesh_for(config)
    agreement = Agreement(mesh.mesh.flatten().tolist())
    with agreement.together("the plan of the model"):
        structure = read_structure(model)
        plan = build_plan(
            structure, config, world_size=mesh.size(), precision=precision, policy=auto_wrap_policy
        )
        check_offload(plan)
    shards = shard(structure, plan, mesh, device_of(mesh), only_real=True)
    for name, target in shards.local.items():
        info = structure.tensors[name].info
        take_slice(Cargo(name, info.shape, info.dtype, True, target, shards.originals[name]), mesh)
    return plan


def sync_module_states(model: nn.Module, full_state_dict: Mapping[str, torch.Tensor]) -> None:
    """Fill a sharded model from rank 0's full state, buffers included.

    Args:
        model: sharded over ranks that all call this; on meta or not.
        full_state_dict: on rank 0, full tensors by name; buffers that it lacks are taken from rank
            0's model. Other ranks pass anything, `{}` for instance.

    Raises:
        ParallelismKeyError: parameters that rank 0's state lacks; the same on every rank.
        ParallelismValueError: nothing in the model is sharded, or a shape differs.
    """
    structure = read_structure(model)
    sharded = next(
        (h.get() for h in structure.tensors.values() if isinstance(h.get(), DTensor)), None
    )
    if sharded is None:
        raise ParallelismValueError("The model is not sharded; call prepare_fully_shard first.")
    mesh = sharded.device_mesh
    agreement = Agreement(mesh.mesh.flatten().tolist())
    first = agreement.ranks[0]
    sources: dict[str, torch.Tensor] = {}
    with agreement.together("rank 0's state"):
        if agreement.rank == first:
            for name, held in structure.tensors.items():
                given = (
                    full_state_dict[alias] for alias in held.info.names if alias in full_state_dict
                )
                value = next(given, None if held.info.kind == "parameter" else held.get())
                if value is None:
                    raise ParallelismKeyError(f"full_state_dict has no {name!r}.")
                if tuple(value.shape) != held.info.shape:
                    raise ParallelismValueError(
                        f"{name}: shape {tuple(value.shape)} in full_state_dict, {held.info.shape} in the model."
                    )
                sources[name] = value.to(held.info.dtype)
    cargoes = [
        Cargo(
            name,
            held.info.shape,
            held.info.dtype,
            isinstance(held.get(), DTensor),
            _storage(model, held, device_of(mesh)),
            sources.get(name),
        )
        for name, held in structure.tensors.items()
        if held.info.kind != "attribute" or held.get().is_meta
    ]
    deliver({first: cargoes}, mesh, ParallelismConfig().bucket_bytes)


def _dtensors(structure: Structure) -> Iterator[DTensor]:
    """The sharded parameters of a model."""
    for held in structure.parameters.values():
        if isinstance(tensor := held.get(), DTensor):
            yield tensor


def _storage(model: nn.Module, held: Held, device: torch.device) -> torch.Tensor:
    """Where a tensor's values go on this rank; made if it has none yet."""
    value = held.get()
    if isinstance(value, DTensor):
        if value.is_meta:
            _, local = _torch.materialise_shard(_fsdp_param(model, held), device, pin_memory=False)
            return local
        return value.to_local().detach()
    if value.is_meta or not value.is_contiguous():
        replace(held, torch.empty(held.info.shape, dtype=held.info.dtype, device=device))
    return held.get().detach()


def _put(model: nn.Module, held: Held, value: torch.Tensor) -> None:
    """Hold a full value: as it is, or this rank's rows of it."""
    now = held.get()
    if not isinstance(now, DTensor):
        return replace(held, value)
    target = _storage(model, held, value.device)
    take_slice(
        Cargo(held.info.name, held.info.shape, held.info.dtype, True, target, value),
        now.device_mesh,
    )
    return None


def _fsdp_param(model: nn.Module, held: Held) -> object:
    places = {place.key_of for place in held.places}
    return next(
        param
        for module in model.modules()
        for key, param in fsdp_params_by_place(module).items()
        if key in places
    )
