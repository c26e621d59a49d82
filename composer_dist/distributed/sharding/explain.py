"""What torch raises because a unit is sharded, or computes in low precision, by the module and the remedy."""

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from traceback import walk_stack, walk_tb
from types import FrameType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from composer_dist import _torch
from composer_dist.distributed import forwards
from composer_dist.distributed.prepared import refuse_copy
from composer_dist.errors import ParallelismRuntimeError
from composer_dist.structure.families import class_name
from composer_dist.structure.names import ancestors, canonical_name, child_name
from composer_dist.wording import dtype_name, listed

_names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""The name of each module of a unit."""
_OTHER_DTYPES = re.compile(r"(?i)same dtype|dtypes? match|expected scalar type|type \(.*should be the same")

_RECAST = (
    "The dtype of parameters has changed since parallelize_model, by model.to(dtype) for example, but FSDP2 "
    "has fixed it. Change it before, or have only the computations in a lower precision: "
    "FSDP2Config(mixed_precision={'param_dtype': 'bfloat16'})."
)


def explain_methods(name: str, module: nn.Module) -> None:
    """Have the public methods of a unit's module, whose class torch has made, explain torch's errors."""
    _names[module] = name
    _explain_class(type(module))  # type: ignore[arg-type]


@functools.cache
def _explain_class(kind: type[nn.Module]) -> None:
    bases = [base for base in _torch.original_class(kind).__mro__ if base not in nn.Module.__mro__]
    methods = {name: method for base in reversed(bases) for name, method in vars(base).items()}
    for name, method in methods.items():
        if isinstance(method, FunctionType) and not name.startswith("_") and not hasattr(nn.Module, name):
            setattr(kind, name, explained(method))
    setattr(kind, "load_state_dict", _checked(kind.load_state_dict))  # noqa: B010 - mypy refuses to assign a method
    refuse_copy(kind)


def _checked(load: Callable[..., Any]) -> Callable[..., Any]:
    """`load_state_dict` of a unit's module that refuses whole tensors for shards by name.

    Torch refuses them in other words, and with `assign=True` after it has put them in place of the shards.
    """

    @functools.wraps(load)
    def call(self: nn.Module, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        shards = [name for name, one in self.named_parameters() if isinstance(one, DTensor)]
        given = {name: value for name in shards if isinstance(value := state_dict.get(name), torch.Tensor)}
        if whole := [name for name, value in given.items() if not isinstance(value, DTensor)]:
            raise ParallelismRuntimeError(
                f"{listed(whole, 3)} of the state is a whole tensor, but the model's is sharded. Call "
                "load_full_model_state(model, state) on all ranks, or load_state_dict inside of "
                "summon_full_params(model)."
            )
        return load(self, state_dict, *args, **kwargs)

    return call


def explained(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a unit's module that explains torch's errors."""

    @functools.wraps(method)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forwards.call_explained(_explain, self, method, self, *args, **kwargs)

    return call


def _explain(error: RuntimeError, module: nn.Module) -> None:
    """Raise an error of this library if torch's is about sharded parameters, or about dtypes that differ."""
    said = str(error)
    if "invalid python storage" in said:  # of safetensors
        remedy = "To save them, call export_pretrained(model, path) on all ranks."
        raise ParallelismRuntimeError(f"The parameters are sharded. {remedy}") from error
    if isinstance(error, ParallelismRuntimeError):
        return
    if any(_torch.is_recast(one) for one in module.modules() if isinstance(one, FSDPModule)):
        raise ParallelismRuntimeError(_RECAST) from error
    inside = _inside(frame for frame, _ in walk_tb(error.__traceback__))
    operation = re.match(r"Operator aten\.(\w+).* does not have a sharding strategy", said)
    if operation is None and "resize_token_embeddings" in dict(inside):
        operation = re.match(r"aten\.(\w+).* got mixed torch.Tensor and DTensor", said)
    if operation is not None:
        raise ParallelismRuntimeError(
            f"torch cannot compute {operation[1]} of sharded parameters. Change the model before "
            "parallelize_model (resize_token_embeddings, for example), and compute with whole parameters "
            "inside of summon_full_params(model)."
        ) from error
    is_mixed = "got mixed torch.Tensor and DTensor" in said
    if not (is_mixed or _OTHER_DTYPES.search(said)):
        return
    names = _names_in(module)
    if not inside or inside[-1][1] not in names:
        return  # a call further out knows the name
    reader = names[inside[-1][1]]
    units = {names[one]: one for one in module.modules() if isinstance(one, FSDPModule)}
    if (unit := next((above for above in ancestors(reader) if above in units), None)) is None:
        return
    params = _torch.fsdp_params(units[unit])
    is_gathered = any(_torch.gathered_param(param) is not None for param in params)
    if not is_mixed:
        low = next((param.mp_policy.param_dtype for param in params), None)
        if low is not None:
            raise _other_dtypes(error, low, unit, names, inside) from error
    elif _torch.current_backward() != -1:
        return  # a recomputed block: see `refused`
    elif not is_gathered and (written := re.search(r"(?:aten\.)?(\w+_)\.\w+:? got mixed", said)) is not None:
        raise ParallelismRuntimeError(
            f"{reader or 'The root'} wrote a whole tensor into a sharded parameter or gradient "
            f"({written[1]}). Shard it too: distribute_tensor(tensor, gradient.device_mesh, "
            "gradient.placements)."
        ) from error
    elif is_gathered or not params:
        raise ParallelismRuntimeError(
            f"{reader or 'The root'} used sharded parameters of another unit: FSDP2 gathers them in calls of "
            "their own unit only. Call that, or leave it whole: Rule(..., shard=False)."
        ) from error
    else:
        raise _used_sharded(inside[-1][1], unit, names, inside) from error


def _other_dtypes(
    error: RuntimeError,
    low: torch.dtype,
    unit: str,
    names: Mapping[nn.Module, str],
    inside: Sequence[tuple[str, nn.Module]],
) -> ParallelismRuntimeError:
    """The error for a forward that mixes dtypes because FSDP2 casts some of them."""
    buffers = {
        child_name(names[one], key): f" ({dtype_name(buffer.dtype)})"
        for _, one in inside
        if one in names
        for key, buffer in vars(one)["_buffers"].items()
        if buffer is not None and buffer.is_floating_point() and buffer.dtype != low
    }
    found = listed([name + dtype for name, dtype in buffers.items()])
    return ParallelismRuntimeError(
        f"{names[inside[-1][1]] or 'The root'} mixed dtypes: {str(error).splitlines()[0].rstrip('.')}. The "
        f"mixed precision of {unit or 'the root'} casts its parameters and inputs to {dtype_name(low)}, but "
        f"{f'not its buffers: {found}' if found else 'no tensors that its forward makes'}. Cast them where "
        f"they are used (buffer.to(x.dtype)), or compute it all in float32: Rule({unit!r}, mixed_precision="
        f"{{'param_dtype': 'float32', 'output_dtype': {dtype_name(low)!r}}})."
    )


def used_outside(part: nn.Module, unit: nn.Module) -> ParallelismRuntimeError:
    """The error for a call of a part of a unit, which runs now, outside of the unit's own calls."""
    inside = _inside(frame for frame, _ in walk_stack(inspect.currentframe()))[::-1]
    return _used_sharded(part, _names.get(unit, ""), _names_in(unit), inside)


def _used_sharded(
    reader: nn.Module, unit: str, names: Mapping[nn.Module, str], inside: Sequence[tuple[str, nn.Module]]
) -> ParallelismRuntimeError:
    """The error for a module of a unit that was used outside of the unit's calls."""
    methods = [method for method, one in inside if names.get(one) == unit and hasattr(type(one), method)]
    other = next((one for one in reversed(methods) if one != "forward" and not one.startswith("_")), None)
    if reader not in names:
        remedy = "FSDP2 gathers no copies: make it inside of summon_full_params(model, writeback=False)."
    elif other is None:
        remedy = f"Call that, or leave the part whole: Rule({names[reader]!r}, shard=False)."
    else:
        remedy = (
            "Call that, not a part of it; another method than forward needs "
            f"ParallelismConfig(forward_methods=[{other!r}])."
        )
        if inside[-1][0] == other:  # no forward of a part
            remedy += (
                " A tensor that meets a sharded parameter or gradient is sharded too: distribute_tensor("
                "tensor, gradient.device_mesh, gradient.placements)."
            )
    name = names.get(reader, f"A copy of a {type(reader).__name__}")
    return ParallelismRuntimeError(
        f"{name or 'The root'} was used while its parameters are sharded: FSDP2 gathers them in calls of "
        f"{unit or 'the root'} only. {remedy}"
    )


def _names_in(unit: nn.Module) -> dict[nn.Module, str]:
    name, found = _names.get(unit, ""), ((one, canonical_name(inner)) for inner, one in unit.named_modules())
    return {one: child_name(name, inner) if inner else name for one, inner in found}


def _inside(frames: Iterable[FrameType]) -> list[tuple[str, nn.Module]]:
    """The functions that run with a module as their first argument, and the module."""
    selves = ((frame.f_code.co_name, next(iter(frame.f_locals.values()), None)) for frame in frames)
    return [(name, one) for name, one in selves if isinstance(one, nn.Module)]


def refused(error: RuntimeError) -> str | None:
    """The message for a backward that needs a parameter that FSDP2 has freed, or that has changed."""
    if "attempting to assign a gradient with dtype" in str(error):
        return _RECAST
    name, is_freed = _torch.refused_parameter(error) or ("a parameter", None)
    if is_freed is None and "got mixed torch.Tensor and DTensor" in str(error):  # in a recomputed block too
        return (
            "Backward mixed sharded and whole tensors. Call full_tensor() on a penalty on sharded parameters "
            "before you add it to the loss. A loss that a forward computes from its parameters must be "
            "returned, or set as an attribute of the module, because FSDP2 frees them after the forward."
        )
    if is_freed is None and "out of bounds for storage of size 0" in str(error):
        is_freed = True
    freed = (
        f"Backward needs {name}, which FSDP2 has freed: a loss was computed from it in forward, and "
        "kept where nothing shows it (in a global list, for example). Return the loss from the "
        "module's forward, or set it as an attribute of the module. If it holds a gradient that was taken "
        "with create_graph=True, run the model's other forwards before that is taken."
    )
    changed = (
        f"Backward needs {name} as forward found it, but it has changed since (by a step of the optimizer, "
        "for example). Call backward() before the step, or run forward again after it."
    )
    if is_freed is None:
        return f"{freed} Or else: {changed}" if _torch.is_refused_view(error) else None
    return freed if is_freed else changed


def changed_in_forward(name: str, module: nn.Module, parameters: Sequence[str]) -> str:
    """The message for a forward that changes parameters.

    Such a change is lost, or differs from rank to rank, in every way of training on several ranks.
    """
    return (
        f"The forward of {name or 'the root'} ({class_name(module)}) changed "
        f"{listed(parameters)} in place, which is lost when FSDP2 frees the gathered copy, and would "
        "differ from rank to rank. Make what forward updates a buffer (register_buffer), or update the "
        "parameter after the optimizer's step, inside of summon_full_params(model, writeback=True)."
    )
