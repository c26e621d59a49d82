"""Tensor parallelism from the plan: matrices are cut among ranks, and forwards follow.

On the meta device each planned parameter becomes a DTensor on the tensor-parallel mesh, which FSDP2 then
shards like any other. A module computes with its own part as with a plain tensor: around its forward the
parameters that it holds are replaced by their local parts (also when it is recomputed), and the collectives
of its style go before and after. Nothing is dispatched through DTensor, so any operation works, on any part.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, update_wrapper, wraps
from types import MethodType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

from composer_dist import _torch
from composer_dist.distributed import forwards
from composer_dist.distributed.forwards import Layer
from composer_dist.distributed.mesh.layout import Coordinate, Layout
from composer_dist.distributed.mesh.mesh import Mesh
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.distributed.tensor_parallel.collectives import (
    SEQUENCE,
    copy,
    gather,
    gather_partial,
    local,
    require_even,
    scatter_total,
    split,
    total,
)
from composer_dist.distributed.tensor_parallel.loss import give_loss
from composer_dist.distributed.tensor_parallel.matrices import Cut, out_dim
from composer_dist.distributed.tensor_parallel.plan import TensorParallelPlan
from composer_dist.distributed.tensor_parallel.styles import Style
from composer_dist.errors import ParallelismRuntimeError
from composer_dist.structure.structure import Held, Structure
from composer_dist.tensors.parts import chunk

_FIRST = ("hidden_states", "x", "input", "inputs", "input_ids")
"""Keyword arguments by which a module may get its activation."""


def apply(structure: Structure, plan: TensorParallelPlan | None, mesh: Mesh) -> dict[str, Tensor]:
    """Cut the planned parameters, on the meta device, and let the modules' forwards follow.

    Returns:
        The parameters as they were before, by first name.

    Raises:
        ParallelismRuntimeError: styles of torch's own cut a tied parameter in two ways.
    """
    if plan is None or (tp := mesh.tp) is None:
        return {}
    originals = {name: structure.tensors[name].cast_shadow() for name in plan.parameters}
    for name, one in plan.modules.items():
        module = _torch.unwrapped(structure.modules[name])
        if isinstance(one.style, Style):
            if one.style.idle:
                continue
            if any(parameter is not None for parameter in module._parameters.values()):
                forwards.add(module, Layer.PARTS, _around(_with_parts, one.style, tp))
            forwards.add(module, Layer.TENSOR_PARALLEL, _around(_with_collectives, one.style, tp))
        else:
            parallelize_module(module, tp, one.style, src_data_rank=None)
    for name in plan.parameters:
        held = structure.tensors[name]
        if name in plan.cuts and name not in plan.of_torch:
            held.put(_cut(held, plan.cuts[name], tp))
        else:
            _retie(held)
    return originals


def arm(structure: Structure, plan: TensorParallelPlan | None, mesh: Mesh, agreement: Agreement) -> None:
    """The last steps, when all tensors have their values.

    Modules get this rank's number of heads and features (initializers read the whole number); the ranks
    that share matrices draw the same random numbers from now on, as dropout on whole activations must.
    """
    if plan is None:
        return
    with agreement.together("the sizes of modules"):
        for one in plan.divisions:
            setattr(_torch.unwrapped(structure.modules[one.module]), one.attribute, one.after)
        if plan.logits is not None:
            give_loss(structure, plan.logits)
    if (tp := mesh.tp) is not None:
        agreement.collectively("the random state", lambda: _align_random_state(tp))


def _align_random_state(mesh: DeviceMesh) -> None:
    device = torch.device(mesh.device_type)
    state = torch.get_rng_state().to(device)
    dist.broadcast(state, group=mesh.get_group(), group_src=0)
    torch.set_rng_state(state.cpu())
    if device.type != "cpu":
        module = torch.get_device_module(device)
        state = module.get_rng_state().to(device)
        dist.broadcast(state, group=mesh.get_group(), group_src=0)
        module.set_rng_state(state.cpu())


def _cut(held: Held, cut: Cut, mesh: DeviceMesh) -> nn.Parameter:
    """A parameter on the meta device, cut among the ranks of `mesh`, like `held` in everything else."""
    layout = Layout(held.info.shape, tp_dim=cut.dim, tp_groups=cut.groups)
    here = Coordinate(tp=mesh.get_local_rank(), tps=mesh.size())
    placement = _torch.StridedShard(cut.dim, split_factor=cut.groups) if cut.groups > 1 else Shard(cut.dim)
    value = DTensor.from_local(
        torch.empty(layout.local_shape(here), dtype=held.info.dtype, device="meta"),
        mesh,
        [placement],
        run_check=False,
        shape=torch.Size(held.info.shape),
        stride=torch.empty(held.info.shape, device="meta").stride(),
    )
    return nn.Parameter(value, requires_grad=held.info.requires_grad)


def _retie(held: Held) -> None:
    """One object in all places again, after torch's styles have made one for each module."""
    found = [tensor for place in held.places if isinstance(tensor := place.get(), DTensor)]
    if any(tensor.placements != found[0].placements for tensor in found):
        raise ParallelismRuntimeError(
            f"{' and '.join(held.info.names)} are one parameter, which the styles of their modules cut in "
            "different ways; give both modules styles that agree."
        )
    if found:
        held.put(found[0])


def _around(inner: Callable[..., Any], style: Style, mesh: DeviceMesh) -> forwards.Wrap:
    """Makes forwards that run in `inner`; deep copies of a module run their own."""

    def styled(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        if not isinstance(forward, MethodType) or forward.__self__ is not module:
            return update_wrapper(partial(inner, module, style, mesh, forward), forward)
        function = forward.__func__

        @wraps(function)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return inner(module, style, mesh, partial(function, module), *args, **kwargs)

        # A method, because torch.compile would tell two partials apart, and compile every block on its own.
        return MethodType(call, module)

    return styled


def _with_parts(
    module: nn.Module, style: Style, mesh: DeviceMesh, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """A module's forward, computed with this rank's parts."""
    with _local_parameters(module, style, mesh):
        return forward(*args, **kwargs)


def _with_collectives(
    module: nn.Module, style: Style, mesh: DeviceMesh, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """A module's forward between the collectives of its style."""
    if style.share:
        with _sharing():
            return forward(*args, **kwargs)
    outside: Tensor | None = None
    if style.cut == "rows":
        ids, outside = _own_rows(module, _first(args, kwargs), mesh)
        args, kwargs = _with_first(ids, args, kwargs)
    elif style.before is not None:
        args, kwargs = _with_first(_enter(style, _first(args, kwargs), mesh), args, kwargs)
    output = forward(*args, **kwargs)
    if outside is not None:
        output = output.masked_fill(outside.unsqueeze(-1), 0)
    if style.after is None:
        return output
    if isinstance(output, tuple):
        return (_leave(module, style, output[0], mesh), *output[1:])
    return _leave(module, style, output, mesh)


def _enter(style: Style, tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    match style.before:
        case "copy":
            return _copy_once(tensor, mesh)
        case "split":
            return split(tensor, -1, mesh)
        case "split_sequence":
            require_even(tensor, mesh)
            return split(tensor, SEQUENCE, mesh)
        case "gather_sequence":
            return gather_partial(tensor, SEQUENCE, mesh)
    return tensor


_copies: list[list[tuple[Tensor, int, Tensor]]] = []
"""Of each module around that shares copies: the tensor, its version, the copy."""


@contextmanager
def _sharing() -> Iterator[None]:
    """Inside, a tensor is copied once, however many modules take it."""
    _copies.append([])
    try:
        yield
    finally:
        _copies.pop()


def _copy_once(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    if not _copies or torch.compiler.is_compiling():  # which cannot ask for versions
        return copy(tensor, mesh)
    for known, version, copied in _copies[-1]:
        if known is tensor and version == _torch.version(tensor):
            return copied
    copied = copy(tensor, mesh)
    _copies[-1].append((tensor, _torch.version(tensor), copied))
    return copied


def _leave(module: nn.Module, style: Style, tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    match style.after:
        case "sum":
            return _add_bias(module, style, total(tensor, mesh), lambda bias: bias)
        case "scatter_sequence":
            tensor = scatter_total(tensor, SEQUENCE, mesh)
            return _add_bias(module, style, tensor, lambda bias: copy(bias, mesh))
        case "gather":
            groups = tensor.unflatten(-1, (style.groups, -1))
            return gather(groups, -1, _out_features(module) // style.groups, mesh).flatten(-2)
        case "gather_sequence":
            return gather(tensor, SEQUENCE, tensor.shape[SEQUENCE] * mesh.size(), mesh)
        case "logits":
            shape = torch.Size([*tensor.shape[:-1], _out_features(module)])
            stride = torch.empty(shape, device="meta").stride()
            dim = tensor.ndim - 1
            return DTensor.from_local(tensor, mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride)
    return tensor


def _out_features(module: nn.Module) -> int:
    weight = cast(Tensor, module._parameters["weight"])  # a DTensor: its shape is the whole matrix's
    return int(weight.shape[out_dim(module)])


def _add_bias(module: nn.Module, style: Style, tensor: Tensor, prepare: Callable[[Tensor], Tensor]) -> Tensor:
    """The bias of a matrix whose input features are cut, added once, to the sum."""
    bias = module._parameters.get("bias")
    if style.cut != "in" or bias is None:
        return tensor
    return tensor + prepare(local(bias) if isinstance(bias, DTensor) else bias).to(tensor.dtype)


@contextmanager
def _local_parameters(module: nn.Module, style: Style, mesh: DeviceMesh) -> Iterator[None]:
    """Inside, `module` holds this rank's parts of its parameters, as plain tensors."""
    held: dict[str, Any] = module._parameters
    before = dict(held)
    padding: Any = getattr(module, "padding_idx", None)
    try:
        for key, parameter in before.items():
            if parameter is None:
                continue
            if style.cut == "in" and key == "bias":
                held[key] = None if isinstance(module, nn.Linear) else torch.zeros_like(parameter)
            elif isinstance(parameter, DTensor):
                held[key] = _own_part(module, key, parameter)
            elif style.cut is not None and key == "weight":
                raise ParallelismRuntimeError(
                    f"The forward of a {type(module).__name__}, whose weight is cut among ranks, was called "
                    "while it holds the whole one; call it outside of summon_full_params."
                )
            elif style.sum_gradients and parameter.requires_grad:
                held[key] = copy(parameter, mesh)
        if style.cut == "rows" and padding is not None:
            first, last = chunk(int(before["weight"].shape[0]), mesh.size(), mesh.get_local_rank())
            vars(module)["padding_idx"] = padding - first if first <= padding < last else None
        yield
    finally:
        held.update(before)
        if style.cut == "rows":
            vars(module)["padding_idx"] = padding


def _own_part(module: nn.Module, key: str, parameter: DTensor) -> Tensor:
    if parameter.device_mesh.ndim > 1:
        raise ParallelismRuntimeError(
            f"The forward of a {type(module).__name__} was called while its {key} is sharded; call the "
            "prepared model, or the unit around it."
        )
    return local(parameter)


def _own_rows(module: nn.Module, ids: Tensor, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """Indices into this rank's rows of an embedding, and which of them are other ranks'.

    What lies outside of the vocabulary stays an index out of range, on every rank.
    """
    rows = int(cast(Tensor, module._parameters["weight"]).shape[0])
    first, last = chunk(rows, mesh.size(), mesh.get_local_rank())
    outside = ((ids < first) | (ids >= last)) & (ids >= 0) & (ids < rows)
    return (ids - first).masked_fill(outside, 0), outside


def _first(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The activation among a module's arguments."""
    if args and isinstance(args[0], Tensor):
        return args[0]
    key = _first_key(kwargs)
    if args or key is None:
        raise ParallelismRuntimeError(
            "A tensor-parallel module was called without a tensor as its first argument "
            f"(or as {', '.join(_FIRST)}); give the style to a module that takes one."
        )
    return cast(Tensor, kwargs[key])


def _first_key(kwargs: Mapping[str, Any]) -> str | None:
    tensors = [key for key, value in kwargs.items() if isinstance(value, Tensor)]
    return next((key for key in _FIRST if key in tensors), tensors[0] if tensors else None)


def _with_first(
    tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (tensor, *args[1:]), kwargs
    return args, kwargs | {str(_first_key(kwargs)): tensor}
