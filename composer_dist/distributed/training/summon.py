"""Temporarily replaces shards with full parameters."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from composer_dist import _torch
from composer_dist.distributed.moving.gather import gather
from composer_dist.distributed.moving.scatter import write_full
from composer_dist.distributed.prepared import check_usable, mesh_of, reshard
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.distributed.ranks.process_group import world_and_rank
from composer_dist.errors import ParallelismRuntimeError, ParallelismValueError
from composer_dist.structure.names import canonical_name
from composer_dist.tensors.inner import encoded


@dataclass
class _Summoned:
    """A sharded parameter, the places where it is registered, and the full one that replaces it."""

    shard: nn.Parameter
    places: list[tuple[nn.Module, str]]
    name: str
    full: nn.Parameter | None = None


@contextmanager
def summon_full_params(
    model: nn.Module,
    writeback: bool = True,
    recurse: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Inside, the modules below `model` hold full, plain parameters; after it, their shards again.

    The shards are the same objects before and after, so optimizers stay bound; ties are kept. Read
    or change the parameters inside, or call modules that are not units; the forward of a unit would
    gather its shards again, without the changes, and is refused. `model` may be any part of a prepared model.

    Args:
        writeback: each rank's changes in the part that it owns are in its shards afterwards.
        recurse: False leaves out the units below `model`, not the plain modules.
        rank0_only: only rank 0 gets full parameters, the others keep their shards; with
            `writeback`, rank 0's changes reach all.
        offload_to_cpu: the full parameters are in host memory.
        with_grads: full gradients too, written back like the parameters.

    Raises:
        ParallelismValueError: a parameter has another shape afterwards, or, with `writeback`, a gradient
            that it did not have, or has been frozen or unfrozen.
        ParallelismRuntimeError: a unit's forward inside, a parameter removed, or a rank does not call it.
    """
    check_usable(model)
    reshard(model)
    summoned = list(_sharded_parameters(model, recurse))
    mesh = mesh_of(model)
    agreement = Agreement(None if mesh is None else mesh.ranks)
    if summoned:
        agreement.reach(
            "summon_full_params",
            [one.name for one in summoned if with_grads and one.shard.grad is not None],
            partial(_check_gradients, agreement.ranks),
        )
    present = not rank0_only or world_and_rank()[1] == 0
    for one in summoned:
        one.full = _summon(one.shard, present, offload_to_cpu, with_grads)
    units = [module for _, module in _modules(model, "", recurse) if isinstance(module, FSDPModule)]
    hooks = [unit.register_forward_pre_hook(_refuse_forward, prepend=True) for unit in units]
    try:
        for one in summoned:
            if one.full is not None:
                _register(one.places, one.full)
        with _torch.shards_kept(model):
            yield
        if writeback and summoned:
            _write_back(summoned, agreement, rank0_only, with_grads)
    finally:
        for hook in hooks:
            hook.remove()
        reshard(model)
        for one in summoned:
            _register(one.places, one.shard)


def _check_gradients(ranks: Sequence[int], present: list[list[str]]) -> None:
    """Raise a ParallelismRuntimeError if some ranks lack gradients that the first one has, or have others."""
    for rank, names in zip(ranks, present, strict=True):
        if differing := sorted({*names} ^ {*present[0]}):
            has, lacks = (rank, ranks[0]) if differing[0] in names else (ranks[0], rank)
            raise ParallelismRuntimeError(
                f"summon_full_params(with_grads=True): rank {has} has a gradient of {differing[0]}, and rank "
                f"{lacks} has none. Run the same backwards on every rank, and reset gradients on all."
            )


def _refuse_forward(module: nn.Module, arguments: object) -> None:
    raise ParallelismRuntimeError(
        f"The forward of {type(module).__name__}, which is sharded, was called inside summon_full_params; "
        "call it outside."
    )


def _sharded_parameters(model: nn.Module, recurse: bool) -> Iterator[_Summoned]:
    """Each sharded parameter once, with all its places."""
    found: dict[int, _Summoned] = {}
    for prefix, module in _modules(model, "", recurse):
        for name, parameter in module._parameters.items():
            if isinstance(parameter, DTensor):
                one = _Summoned(parameter, [], canonical_name(f"{prefix}{name}"))
                found.setdefault(id(parameter), one).places.append((module, name))
    yield from found.values()


def _modules(module: nn.Module, prefix: str, recurse: bool) -> Iterator[tuple[str, nn.Module]]:
    yield prefix, module
    for name, child in module.named_children():
        if recurse or not isinstance(child, FSDPModule):
            yield from _modules(child, f"{prefix}{name}.", recurse)


def _summon(
    shard: nn.Parameter, present: bool, offload_to_cpu: bool, with_grads: bool
) -> nn.Parameter | None:
    """The full parameter that replaces `shard`; None if this rank gets none."""

    def full(tensor: Tensor) -> Tensor | None:
        value = gather(tensor)  # a collective: on every rank, whether or not it keeps the value
        return (value.cpu() if offload_to_cpu else value) if present else None

    value = full(shard)
    gradient = full(shard.grad) if with_grads and shard.grad is not None else None
    if value is None:
        return None
    parameter = nn.Parameter(value, requires_grad=shard.requires_grad)
    parameter.grad = gradient
    return parameter


def _register(places: list[tuple[nn.Module, str]], parameter: nn.Parameter) -> None:
    for module, name in places:
        module._parameters[name] = parameter


def _write_back(summoned: list[_Summoned], agreement: Agreement, rank0_only: bool, with_grads: bool) -> None:
    """Check the parameters that the modules hold now, and write them into the shards."""
    with agreement.together("summon_full_params"):
        held = [None if one.full is None else _held(one, with_grads) for one in summoned]
    for one, full in zip(summoned, held, strict=True):
        write_full(one.shard, full, rank0_only)
        if with_grads and one.shard.grad is not None:
            write_full(one.shard.grad, None if full is None else full.grad, rank0_only)


def _held(one: _Summoned, with_grads: bool) -> Tensor:
    """The full parameter that is registered now, which the user may have replaced."""
    module, name = one.places[0]
    now = module._parameters[name]
    if now is None or isinstance(now, DTensor):
        raise ParallelismRuntimeError(
            f"{one.name} is no longer a full parameter at the end of summon_full_params: it was removed, or "
            "the forward of an enclosing module replaced it; call that outside."
        )
    wanted: list[tuple[str, Tensor | None]] = [("", now)]
    if with_grads and one.shard.grad is not None:
        wanted.append(("The gradient of ", now.grad))
    for what, tensor in wanted:
        if tensor is None or tensor.shape != one.shard.shape:
            raise ParallelismValueError(
                f"{what}{one.name} has shape {None if tensor is None else tuple(tensor.shape)} at the "
                f"end of summon_full_params, {tuple(one.shard.shape)} before; change values only."
            )
    lost = ""
    if now.grad is not None and len(wanted) == 1:
        lost = f"{one.name} got a gradient"
    elif now is one.full and now.requires_grad != one.shard.requires_grad:
        lost = f"requires_grad of {one.name} was changed"
    if lost:
        raise ParallelismValueError(
            f"{lost} inside of summon_full_params, where it would be lost; do that outside. To read only, "
            "pass writeback=False."
        )
    return encoded(now, one.shard)
