"""Gathers a model's full state from its shards, and loads one into them.

Names are the names in the plain model's `state_dict()`. Tensors move in buckets, so no rank holds more than
one bucket beyond its result.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer_dist.checkpoint.gather import agree_on, gather_full
from composer_dist.checkpoint.kinds.model import foreign_tensors, live_state, owner_of
from composer_dist.distributed.moving.scatter import fill
from composer_dist.distributed.prepared import follow_buffers, mesh_of_world, usable_or_marked
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.distributed.ranks.process_group import broadcast, device_of_group, world_and_rank
from composer_dist.errors import CheckpointValueError, ParallelismValueError
from composer_dist.files.mismatch import StateMismatch
from composer_dist.models.adapters import adapter_keys, whole_state
from composer_dist.structure.names import canonical_name
from composer_dist.tensors.inner import codec_of, empty_like, own_attributes

Select = Literal["trainable", "adapters"] | Callable[[str, Tensor], bool] | None


def full_model_state(
    model: nn.Module,
    *,
    select: Select = None,
    ranks: Literal["zero", "all"] = "zero",
    dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    """The keys and full values of the plain model's `state_dict()`, copied to the CPU.

    A collective on a sharded model. Only selected tensors are gathered.

    Args:
        model: sharded or not.
        select: None for all; "trainable" parameters; "adapters", by peft's rules; or a function
            `(name, tensor) -> bool`, which sees a shard with its full shape and must return the same on
            every rank.
        ranks: which ranks get the state; the others get `{}`. Each rank of a model that is not sharded gets
            its own.
        dtype: floating-point tensors are cast to it; None keeps their own.

    Raises:
        CheckpointValueError: the model has no adapters to select, or a selected tensor is on the meta device.
        ParallelismValueError: an option is unknown, or ranks select different names or options.
    """
    if ranks not in ("zero", "all"):
        raise ParallelismValueError(f'ranks must be "zero" or "all", not {ranks!r}.')
    state = live_state(model)
    chosen: dict[str, Any] = {}
    error: Exception | None = None
    try:
        chosen = _select(model, state, select)
    except Exception as caught:  # the user's function, on this rank alone perhaps
        error = caught
    options = f"ranks={ranks!r}, dtype={dtype}"
    if agree_on("full_model_state", state.values(), list(chosen), error, options) and ranks == "all":
        follow_buffers(model)
    full = gather_full(
        {name: v for name, v in chosen.items() if isinstance(v, Tensor)}, ranks == "all", dtype
    )
    if ranks == "zero" and world_and_rank()[1] != 0:
        return {}
    return {name: full[name] if isinstance(v, Tensor) else v for name, v in chosen.items()}


class LoadResult(NamedTuple):
    """The names that did not match between a state and a model."""

    missing: list[str]
    """Names that the model saves and the state lacks; one name of a tied tensor is enough."""
    unexpected: list[str]
    """Names in the state that the model does not have."""


def load_full_model_state(
    model: nn.Module,
    state: Mapping[str, Any],
    *,
    strict: bool = True,
    source: Literal["rank0", "all"] = "rank0",
) -> LoadResult:
    """Write a full state into `model`, sharded or not, on the meta device or not; a collective.

    Tensors are cast to the model's dtypes. A parameter on the meta device becomes real on its mesh's device
    and stays the same object; tensors that the state lacks stay on meta. If anything is refused, nothing is
    written.

    Args:
        model: as prepared, or plain.
        state: full tensors by name, as from `full_model_state`; names may have wrapper segments.
        strict: raise if names are missing or unexpected.
        source: "rank0" reads rank 0's `state` and ignores the others'; "all" lets every rank read
            its own, equal one, without sending tensors.

    Raises:
        CheckpointKeyError: `strict`, and names are missing or unexpected: all of them are listed.
        CheckpointValueError: shapes differ: all of them are listed.
        ParallelismError: something failed halfway; the model is unusable from then on.
    """
    if source not in ("rank0", "all"):
        raise ParallelismValueError(f'source must be "rank0" or "all", not {source!r}.')
    with whole_state(model):
        targets = live_state(model)
    given: dict[str, Any] = {}
    plan: dict[str, Any] = {}
    error: Exception | None = foreign_tensors(model, targets)
    if error is None and (source == "all" or world_and_rank()[1] == 0):
        try:
            given = {canonical_name(name): value for name, value in state.items()}
            plan = _plan_load(list(live_state(model)), targets, given, strict)
        except Exception as caught:
            error = caught
    agreement = Agreement()
    plan = agreement.reach("load_full_model_state", [source, plan], _first_plan, error)
    with usable_or_marked(model):
        with agreement.together("the memory of the model"):
            for name in plan["tensors"]:
                _materialize(targets[name])
        chosen = {name: targets[name] for name in plan["tensors"]}
        fill(mesh_of_world(model), chosen, given, everywhere=source == "all")
        values = [given.get(name) for name in plan["objects"]]
        values = values if source == "all" else broadcast(values)
        with agreement.together("the extra state"):
            for name, value in zip(plan["objects"], values, strict=True):
                owner_of(model, name).set_extra_state(value)
    return LoadResult(plan["missing"], plan["unexpected"])


def _select(model: nn.Module, state: dict[str, Any], select: Select) -> dict[str, Any]:
    if select is None:
        chosen = state
    elif select == "trainable":
        chosen = {n: v for n, v in state.items() if isinstance(v, Tensor) and v.requires_grad}
    elif select == "adapters":
        keys = adapter_keys(model)
        chosen = {name: value for name, value in state.items() if name in keys}
    elif callable(select):
        chosen = {n: v for n, v in state.items() if isinstance(v, Tensor) and select(n, v)}
    else:
        raise ParallelismValueError(
            f'select must be "trainable", "adapters", a function or None, not {select!r}.'
        )
    if meta := [name for name, value in chosen.items() if isinstance(value, Tensor) and value.is_meta]:
        raise CheckpointValueError(f"These tensors are on the meta device: {', '.join(meta)}.")
    return chosen


def _first_plan(posts: list[list[Any]]) -> Any:
    for rank, (source, _) in enumerate(posts):
        if source != posts[0][0]:
            raise ParallelismValueError(
                f"Ranks 0 and {rank} pass different sources, {posts[0][0]!r} and {source!r}; every rank must "
                "make the same call."
            )
    return posts[0][1]


def _plan_load(
    expected: list[str], targets: Mapping[str, Any], given: Mapping[str, Any], strict: bool
) -> dict[str, Any]:
    """The names to load (each tensor once), and the names that do not match."""
    present = {id(targets[name]) for name in given if name in targets}
    missing = [name for name in expected if id(targets[name]) not in present]
    unexpected = [name for name in given if name not in targets]
    tensors: dict[int, str] = {}
    objects, misfits = [], []
    for name, value in given.items():
        target = targets.get(name)
        if isinstance(target, Tensor) and isinstance(value, Tensor):
            if target.shape != value.shape:
                misfits.append(f"{name}: {tuple(value.shape)} in the state, {tuple(target.shape)} here")
            elif value.is_meta:
                misfits.append(f"{name}: without values, on the meta device, in the state")
            tensors[id(target)] = name  # the last of tied names wins, as in load_state_dict()
        elif isinstance(target, Tensor):
            misfits.append(f"{name}: {type(value).__name__} in the state, a tensor here")
        elif name in targets:
            objects.append(name)
    StateMismatch(missing, unexpected, misfits).check("The state does not match the model", strict)
    names = {"missing": missing, "unexpected": unexpected}
    return {"tensors": list(tensors.values()), "objects": objects, **names}


@torch.no_grad()
def _materialize(target: Tensor) -> None:
    """Give a tensor on the meta device uninitialized memory; it stays the same object."""
    if not target.is_meta:
        return
    mesh = target.device_mesh if isinstance(target, DTensor) else None
    device = device_of_group() if mesh is None else torch.device(mesh.device_type)
    real: Tensor
    if codec_of(target) is None:
        real = torch.empty_like(target, device=device)
    elif isinstance(target, DTensor):
        real = DTensor.from_local(empty_like(target.to_local(), device), mesh, target.placements)
    else:
        real = empty_like(target, device)
    if isinstance(target, nn.Parameter):
        real = nn.Parameter(real, requires_grad=target.requires_grad)
    real.__dict__.update(own_attributes(target))
    torch.utils.swap_tensors(target, real)
