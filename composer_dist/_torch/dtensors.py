"""Operations on DTensors that torch silently computes differently than on whole tensors."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from inspect import currentframe
from itertools import compress
from traceback import walk_stack
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composer_dist._torch.data_writes import read_data
from composer_dist._torch.gathered import is_changed_view, is_gathered
from composer_dist._torch.operations import BY_INDEX, fill_diagonal, write_part
from composer_dist._torch.tensors import storage_key, version
from composer_dist.errors import ParallelismRuntimeError


def refuse_local_scalars(message: str) -> None:
    """Have `item()`, `float()` and `if` on a DTensor that holds only this rank's part raise `message`.

    torch returns the part. For all DTensors of the process, by the table in which torch's own
    `loss_parallel` puts its operations. Since torch 2.2.
    """

    def scalar(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor: DTensor = args[0]
        sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
        if any(size > 1 and not placement.is_replicate() for placement, size in sizes):
            raise ParallelismRuntimeError(message)
        return op(tensor._local_tensor)

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten._local_scalar_dense.default] = scalar


def check_scaled_gradients() -> None:
    """Have `torch.amp.GradScaler` take whole gradients and those of several meshes, and inform all ranks.

    torch's own refuses the former, and informs only the ranks of the first gradient's mesh. It uses the same
    table. Since torch 2.2.
    """

    def unscale(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        gradients, found, inverse = args
        cut = [one for one in gradients if isinstance(one, DTensor)]
        op([one.to_local() if isinstance(one, DTensor) else one for one in gradients], found, inverse)
        for mesh in dict.fromkeys(one.device_mesh for one in cut):
            for group in mesh.get_all_groups():
                dist.all_reduce(found, dist.ReduceOp.MAX, group)

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers[_aten._amp_foreach_non_finite_check_and_unscale_.default] = unscale


@contextmanager
def cheap_detach() -> Iterator[None]:
    """Inside, `detach` of a DTensor only wraps its part again.

    torch finds out by fake tensors what the result's shape is, once for each shape; FSDP2 detaches each shard
    that it makes, and so does `nn.Parameter`. By the same table. Since torch 2.2.
    """

    def detach(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return DTensor(op(args[0]._local_tensor), args[0]._spec, requires_grad=False)

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers[_aten.detach.default] = detach
    try:
        yield
    finally:
        handlers.pop(_aten.detach.default, None)


def refuse_lost_writes(
    to_view: str, at_once: str, to_data: str, to_share: str, to_send: str, of_whole: str
) -> None:
    """Raise an error for writes that DTensors lose or repeat on every rank, and for what crashes them.

    A part of a sharded dimension (`parameter.data[0]`) is a gathered copy, so what is written there is lost.
    So is a new `.data`, because a DTensor keeps the part that it has. For all DTensors of the process, as in
    `refuse_local_scalars`; all operations that write are watched once a part was made, and until then are as
    fast as before. Those of optimizers that write into many tensors are counted as changes. Since torch 2.6.

    Args:
        at_once, to_send, of_whole: with a place for the operation's name.
    """
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    if _PARTS[0] in handlers:
        return

    def run(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], handler: Any) -> Any:
        handlers.pop(op, None)
        try:
            return op(*args, **kwargs)
        finally:
            handlers[op] = handler

    def part(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _aten.zero_.default not in handlers:
            handlers.update(dict.fromkeys(set(_writes()) - handlers.keys(), write))
        return run(op, args, kwargs, part)

    def write(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        written = kwargs.get("out", args[0])
        many = written if isinstance(written, (list, tuple)) else []
        if any(map(_is_gathered, many or [written])):
            raise ParallelismRuntimeError(to_view)
        if op in _FILLS and _is_cut(written, on_any_device="out" in kwargs):
            raise ParallelismRuntimeError(at_once.format(op.overloadpacket.__name__))
        try:
            result = run(op, args, kwargs, write)
        except RuntimeError as error:
            if many and "got mixed" in str(error):
                for its in _alike(many, args):
                    result = run(op, its, kwargs, write)
            elif not many and _OTHER_LAYOUT in str(error):
                result = run(op, (written, *_laid_out(args[1:], written)), kwargs, write)
            else:
                raise
        if many:  # which torch counts for other tensors only
            torch.autograd.graph.increment_version([one for one in many if not one.is_inference()])
        return result

    def write_by_index(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _is_gathered(args[0]):
            raise ParallelismRuntimeError(to_view)
        if not _is_cut(args[0], on_any_device=True):
            return run(op, args, kwargs, write_by_index)
        write_part(op, *args, **kwargs)  # torch refuses most, and index_copy_ makes another layout of it
        return args[0]

    def fill(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `tensor[:, 0] = 1.0` calls; torch has it for numbers only."""
        return write(_aten.fill_.Scalar, (args[0], args[1].item()), kwargs)

    def send(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise ParallelismRuntimeError(to_send.format(op.overloadpacket.__name__.rstrip("_")))

    handlers.update(dict.fromkeys(_PARTS, part) | dict.fromkeys(_SENDS, send))
    handlers[_aten.fill_.Tensor] = fill
    handlers.update(
        dict.fromkeys(_FILLS | _MANY | {_aten.add_.Tensor}, write) | dict.fromkeys(BY_INDEX, write_by_index)
    )
    setattr(DTensor, "data", property(read_data, _refusing(to_data)))  # noqa: B010 - mypy knows its type
    setattr(DTensor, "share_memory_", _refusing(to_share))  # noqa: B010
    setattr(DTensor, "fill_diagonal_", fill_diagonal)  # noqa: B010
    for name in _WITH_ANOTHER:
        setattr(DTensor, name, _explained(getattr(torch.Tensor, name), of_whole.format(name)))


_holders: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
"""The modules that hold cut parameters, and their keys; torch cannot swap parameters with weak references."""
_counted: dict[int, int] = {}
"""The version that each cut parameter had when its part was last updated, by the parameter's id."""


def count_changes(module: nn.Module, key: str) -> None:
    """Make autograd notice in-place changes of a cut parameter where a forward has used its part.

    DTensor does not count them for the part. `count_all_changes` is called before each backward. Since
    torch 2.4.
    """
    parameter: Any = module._parameters[key]
    now = version(parameter)
    # FSDP2's have versions of their own, and functional_call puts tensors in their place.
    if isinstance(parameter, DTensor) and isinstance(parameter, nn.Parameter) and not is_gathered(now):
        if _counted.get(id(parameter), now) != now:
            torch.autograd.graph.increment_version(parameter._local_tensor)
        _counted[id(parameter)] = now
        _holders.setdefault(module, set()).add(key)


def count_all_changes() -> None:
    """Make autograd notice the changes since the forwards."""
    for module, keys in list(_holders.items()):
        for key in keys & module._parameters.keys():
            if id(module._parameters[key]) in _counted:
                count_changes(module, key)


def forget_changes(module: nn.Module) -> None:
    """Count no changes of the parameters that a module holds now."""
    for key in _holders.pop(module, ()):
        _counted.pop(id(module._parameters.get(key)), None)


def is_changed_part(error: RuntimeError) -> bool:
    """Whether autograd refuses a view of a part because of `count_changes`."""
    return bool(_counted) and is_changed_view(error)


def _alike(written: Sequence[Any], args: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Arguments for sharded tensors and for whole ones, which torch does not take in one call."""
    lists = [isinstance(one, (list, tuple)) and len(one) == len(written) for one in args]
    for is_sharded in {isinstance(one, DTensor) for one in written}:
        chosen = [isinstance(one, DTensor) is is_sharded for one in written]
        yield tuple(
            list(compress(one, chosen)) if is_list else one for one, is_list in zip(args, lists, strict=True)
        )


def _explained(method: Callable[..., Any], message: str) -> Callable[..., Any]:
    """A method of DTensor that takes other layouts, and raises `message` for whole tensors.

    Not in methods of modules: there, the modules' names are known further out.
    """

    @wraps(method)
    def call(tensor: DTensor, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(tensor, *args, **kwargs)
        except RuntimeError as error:
            if _OTHER_LAYOUT in str(error):
                return method(tensor, *_laid_out(args, tensor), **kwargs)
            if "got mixed torch.Tensor and DTensor" not in str(error):
                raise
            for frame, _ in walk_stack(currentframe()):
                caller = next(iter(frame.f_locals.values()), None)
                if isinstance(caller, nn.Module) and hasattr(type(caller), frame.f_code.co_name):
                    raise
            raise ParallelismRuntimeError(message) from error

    return call


def _laid_out(args: Sequence[Any], tensor: DTensor) -> list[Any]:
    """The arguments; DTensors are laid out as the tensor is."""
    return [
        one.redistribute(placements=tensor.placements) if isinstance(one, DTensor) else one for one in args
    ]


def _is_gathered(tensor: Any) -> bool:
    base = tensor._base if isinstance(tensor, DTensor) else None
    return isinstance(base, DTensor) and storage_key(base._local_tensor) != storage_key(tensor._local_tensor)


def _is_cut(tensor: DTensor, on_any_device: bool) -> bool:
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    cut = any(size > 1 and placement.is_shard() for placement, size in sizes)
    return cut and (on_any_device or tensor.device_mesh.device_type == "cpu")


def _refusing(message: str) -> Callable[..., None]:
    def refuse(*args: Any) -> None:
        raise ParallelismRuntimeError(message)

    return refuse


_OTHER_LAYOUT = "require placement changes"
_aten = torch.ops.aten
_PARTS = (_aten.select.int, _aten.slice.Tensor, _aten.split.Tensor, _aten.diagonal.default)
_COLLECTIVES = "allreduce_ broadcast_ allgather_ _allgather_base_ _reduce_scatter_base_ reduce_ send"
_SENDS = [getattr(torch.ops.c10d, name).default for name in _COLLECTIVES.split()]
_RANDOM = "normal_ uniform_ bernoulli_ exponential_ log_normal_ cauchy_ geometric_ random_ bernoulli"
_FILLS = frozenset(
    getattr(packet, overload)
    for name in f"{_RANDOM} rand_like randn_like randint_like eye arange linspace randperm rand randn".split()
    for packet in [getattr(_aten, name)]
    for overload in packet.overloads()
)
_WITH_ANOTHER = [
    "add_",
    "sub_",
    "mul_",
    "div_",
    "copy_",
    "lerp_",
    "__iadd__",
    "__isub__",
    "__imul__",
    "__itruediv__",
]
_MANY = frozenset(
    getattr(packet, overload)
    for name in dir(torch)
    if name.startswith(("_foreach_", "_fused_")) and name.endswith("_")
    for packet in [getattr(_aten, name)]
    for overload in packet.overloads()
    if "out" not in overload
)


def _writes() -> Sequence[Any]:
    """All operations that write into their first argument, or into `out`. Since torch 1.12."""
    found = []
    for schema in torch._C._jit_get_all_schemas():
        written = [one.name for one in schema.arguments if one.alias_info and one.alias_info.is_write]
        if schema.name.startswith("aten::") and written and written[0] in ("self", "out"):
            found.append(getattr(getattr(_aten, schema.name[6:]), schema.overload_name or "default"))
    return found
