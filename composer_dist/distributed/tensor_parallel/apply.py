"""Tensor parallelism from the plan: cuts matrices among ranks and wraps the forwards of their modules.

On the meta device each planned parameter becomes a DTensor on the tensor-parallel mesh, which FSDP2 then
shards like any other. During a module's forward (also when it is recomputed) its parameters are replaced by
this rank's parts, as plain tensors, and the collectives of its style run before and after it. No operation is
dispatched through DTensor, so any operation works on any part.
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
from composer_dist.distributed.tensor_parallel import collectives
from composer_dist.distributed.tensor_parallel.alike import compare_forwards
from composer_dist.distributed.tensor_parallel.collectives import SEQUENCE, local
from composer_dist.distributed.tensor_parallel.loss import gather_to_generate, give_loss
from composer_dist.distributed.tensor_parallel.matrices import Cut, out_dim
from composer_dist.distributed.tensor_parallel.plan import TensorParallelPlan
from composer_dist.distributed.tensor_parallel.styles import Style
from composer_dist.errors import ParallelismRuntimeError
from composer_dist.structure.structure import Held, Structure
from composer_dist.tensors.inner import dtensor_of
from composer_dist.tensors.parts import chunk

_FIRST = ("hidden_states", "x", "input", "inputs", "input_ids")
"""Names of keyword arguments that hold a module's activation."""


def apply(structure: Structure, plan: TensorParallelPlan | None, mesh: Mesh) -> dict[str, Tensor]:
    """Cut the planned parameters, on the meta device, and wrap the forwards of their modules.

    The result is the parameters before the cut, by first name.
    """
    if plan is None or (tp := mesh.tp) is None:
        return {}
    originals = {name: structure.tensors[name].cast_shadow() for name in plan.parameters}
    divide(structure, plan, tp)
    return originals


def divide(structure: Structure, plan: TensorParallelPlan, tp: DeviceMesh) -> None:
    """Cut the planned parameters, whose values are not read, and wrap the forwards of their modules."""
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


def give_sizes(structure: Structure, plan: TensorParallelPlan) -> None:
    """Give modules this rank's number of heads and features, and the model a loss for cut logits."""
    for one in plan.divisions:
        setattr(_torch.unwrapped(structure.modules[one.module]), one.attribute, one.after)
    if plan.logits is not None:
        give_loss(structure, plan.logits)
        gather_to_generate(structure, plan.logits)


def arm(structure: Structure, plan: TensorParallelPlan | None, mesh: Mesh, agreement: Agreement) -> None:
    """Take the last steps, after all tensors have their values.

    Modules get this rank's number of heads and features (initializers read the whole number). The ranks that
    share matrices get the same random state, because dropout on whole activations must be the same on all.
    """
    if plan is None:
        return
    with agreement.together("the sizes of modules"):
        give_sizes(structure, plan)
    _torch.at_start_of_backward(_torch.count_all_changes)
    _torch.explain_in_backward(_changed)
    if (tp := mesh.tp) is not None:
        agreement.collectively("the random state", lambda: _align_random_state(tp))
        compare_forwards(structure.modules[""], tp)


def _changed(error: RuntimeError) -> str | None:
    if not _torch.is_changed_part(error):
        return None
    return (
        "Backward needs a weight that tensor parallelism has cut as forward found it, but it has been "
        "modified by an inplace operation since (a step of the optimizer, for example). Call backward() "
        "before the step, or run forward again after it."
    )


def _align_random_state(mesh: DeviceMesh) -> None:
    device = torch.device(mesh.device_type)
    generators: list[Any] = [torch]
    if device.type != "cpu":
        generators.append(torch.get_device_module(device))
    for generator in generators:
        state = generator.get_rng_state().to(device)
        dist.broadcast(state, group=mesh.get_group(), group_src=0)
        generator.set_rng_state(state.cpu())


def _cut(held: Held, cut: Cut, mesh: DeviceMesh) -> nn.Parameter:
    """The parameter `held` without values, cut among the ranks of `mesh`."""
    layout = Layout(held.info.shape, tp_dim=cut.dim, tp_groups=cut.groups)
    here = Coordinate(tp=mesh.get_local_rank(), tps=mesh.size())
    placement = _torch.StridedShard(cut.dim, split_factor=cut.groups) if cut.groups > 1 else Shard(cut.dim)
    part = torch.empty(layout.local_shape(here), dtype=held.info.dtype, device=held.get().device)
    value = dtensor_of(part, mesh, [placement], held.info.shape)
    return nn.Parameter(value, requires_grad=held.info.requires_grad)


def _retie(held: Held) -> None:
    """Tie the parameter again: torch's styles make a new object for each module."""
    found = [tensor for place in held.places if isinstance(tensor := place.get(), DTensor)]
    if any(tensor.placements != found[0].placements for tensor in found):
        raise ParallelismRuntimeError(
            f"{' and '.join(held.info.names)} are one parameter, but the styles of their modules cut it in "
            "different ways; give both modules styles that agree."
        )
    if found:
        held.put(found[0])


def _around(inner: Callable[..., Any], style: Style, mesh: DeviceMesh) -> forwards.Wrap:
    """Wraps a forward in `inner`, such that a deep copy of the module runs its own forward."""

    def styled(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        if not isinstance(forward, MethodType) or forward.__self__ is not module:
            return update_wrapper(partial(inner, module, style, mesh, forward), forward)
        function = forward.__func__

        @wraps(function)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return inner(module, style, mesh, partial(function, module), *args, **kwargs)

        # torch.compile distinguishes two partials and would compile every block separately; not so methods.
        return MethodType(call, module)

    return styled


def _with_parts(
    module: nn.Module, style: Style, mesh: DeviceMesh, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    with _local_parameters(module, style, mesh):
        return forward(*args, **kwargs)


def _with_collectives(
    module: nn.Module, style: Style, mesh: DeviceMesh, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    if style.share:
        with _sharing():
            return forward(*args, **kwargs)
    outside: Tensor | None = None
    if style.cut == "rows" or style.before is not None:
        key = _activation_key(args, kwargs)
        tensor = args[0] if key is None else kwargs[key]
        if style.cut == "rows":
            tensor, outside = _own_rows(module, tensor, mesh)
        else:
            tensor = _enter(style, tensor, mesh)
        args, kwargs = ((tensor, *args[1:]), kwargs) if key is None else (args, kwargs | {key: tensor})
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
            return collectives.split(tensor, -1, mesh)
        case "split_sequence":
            collectives.require_even(tensor, mesh)
            return collectives.split(tensor, SEQUENCE, mesh)
        case "gather_sequence":
            return collectives.gather_partial(tensor, SEQUENCE, mesh)
    return tensor


_copies: list[list[tuple[Tensor, int, Tensor]]] = []
"""For each surrounding module that shares copies: tensors, their versions and their copies."""


@contextmanager
def _sharing() -> Iterator[None]:
    """Inside, a tensor is copied once, however many modules use it."""
    _copies.append([])
    try:
        yield
    finally:
        _copies.pop()


def _copy_once(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    if not _copies or torch.compiler.is_compiling():  # the compiler does not support versions
        return collectives.copy(tensor, mesh)
    for known, version, copied in _copies[-1]:
        if known is tensor and version == _torch.version(tensor):
            return copied
    copied = collectives.copy(tensor, mesh)
    _copies[-1].append((tensor, _torch.version(tensor), copied))
    return copied


def _leave(module: nn.Module, style: Style, tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    match style.after:
        case "sum":
            return _add_bias(module, style, collectives.total(tensor, mesh), lambda bias: bias)
        case "scatter_sequence":
            tensor = collectives.scatter_total(tensor, SEQUENCE, mesh)
            return _add_bias(module, style, tensor, lambda bias: collectives.copy(bias, mesh))
        case "gather":
            groups = tensor.unflatten(-1, (style.groups, -1))
            size = _out_features(module) // style.groups
            return collectives.gather(groups, -1, size, mesh).flatten(-2)
        case "gather_sequence":
            return collectives.gather(tensor, SEQUENCE, tensor.shape[SEQUENCE] * mesh.size(), mesh)
        case "logits":
            shape = (*tensor.shape[:-1], _out_features(module))
            return dtensor_of(tensor, mesh, [Shard(tensor.ndim - 1)], shape)
    return tensor


def _out_features(module: nn.Module) -> int:
    weight = cast(Tensor, module._parameters["weight"])  # a DTensor: its shape is the whole matrix's
    return int(weight.shape[out_dim(module)])


def _add_bias(module: nn.Module, style: Style, tensor: Tensor, prepare: Callable[[Tensor], Tensor]) -> Tensor:
    """Add the bias of a matrix whose input features are cut: once, to the sum."""
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
                    f"The forward of a {type(module).__name__} was called while it holds the whole weight, "
                    "which tensor parallelism cuts; call it outside of summon_full_params."
                )
            elif style.sum_gradients and parameter.requires_grad:
                held[key] = collectives.copy(parameter, mesh)
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
            "prepared model, or the unit that contains the module."
        )
    if not torch.compiler.is_compiling():  # the compiler does not support versions
        _torch.count_changes(module, key)
    return local(parameter)


def _own_rows(module: nn.Module, ids: Tensor, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """Indices into this rank's rows of an embedding, and a mask of those that other ranks have.

    An index that is out of range stays out of range on every rank.
    """
    rows = int(cast(Tensor, module._parameters["weight"]).shape[0])
    first, last = chunk(rows, mesh.size(), mesh.get_local_rank())
    outside = ((ids < first) | (ids >= last)) & (ids >= 0) & (ids < rows)
    return (ids - first).masked_fill(outside, 0), outside


def _activation_key(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """The keyword of the activation among a module's arguments; None if it is the first argument."""
    if args and isinstance(args[0], Tensor):
        return None
    keys = [key for key, value in kwargs.items() if isinstance(value, Tensor)]
    if args or not keys:
        raise ParallelismRuntimeError(
            "A tensor-parallel module was called without a tensor as its first argument "
            f"(or as {', '.join(_FIRST)}); give the style to a module that takes one."
        )
    return next((key for key in _FIRST if key in keys), keys[0])
