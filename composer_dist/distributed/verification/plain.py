"""A plain copy of a prepared model: whole tensors, the original classes, and neither our hooks nor layers."""

import copy
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from composer_dist import _torch
from composer_dist.distributed import prepared
from composer_dist.distributed.forwards import Layers
from composer_dist.distributed.moving.gather import gather
from composer_dist.structure.families import original_classes
from composer_dist.structure.structure import read_structure

_OF_LIBRARIES = ("composer_dist", "torch.distributed")
_FILES = tuple(str(Path(str(one)).parent) + "/" for one in (Path(__file__).parents[1] / "x", dist.__file__))
_LEFT_OUT = False
"""Stands in a copy for what is removed later; deepcopy takes None for what it has not copied yet."""
_COMPOSABLE = "__composable_api_state_key"  # under which torch keeps the state of fully_shard and replicate


def plain_copy(model: nn.Module, name: str = "", without: Sequence[str] = ()) -> nn.Module:
    """An unsharded copy of a module of `model`, by default of all of it, on this rank; a collective.

    Parameters are gathered one after the other. Hooks, methods and forwards that this library and
    torch.distributed have added are left out; those of the caller's are kept. The numbers of heads and
    features that tensor parallelism has divided are those of the whole model.

    Args:
        without: names of modules whose parameters and buffers are on the meta device in the copy.
    """
    prepared.reshard(model)
    plan, model = getattr(prepared.of(model), "plan", None), read_structure(model).modules[name]
    structure = read_structure(model)
    memo: dict[int, Any] = {}
    for held in structure.tensors.values():
        left = all(any(one.startswith(f"{outer}.") for outer in without) for one in held.info.names)
        for place in held.places:
            tensor = place.get()
            if id(tensor) not in memo:
                memo[id(tensor)] = _whole(tensor, left)
    modules = list(model.modules())
    kept: dict[nn.Module, dict[str, Any]] = {}
    for module in modules:
        kept[module] = {}
        for key, value in vars(module).items():
            if key.endswith("_hooks") and isinstance(value, dict):
                kept[module][key] = {at: hook for at, hook in value.items() if not _is_library(hook)}
                memo[id(value)] = _LEFT_OUT
            elif _is_added(module, key, value):
                memo[id(value)] = _LEFT_OUT
            elif isinstance(value, (dist.ProcessGroup, DeviceMesh)):
                memo[id(value)] = value
    with original_classes(modules):
        copied = copy.deepcopy(model, memo)
    for module in modules:
        _finish(module, memo[id(module)], kept[module], memo)
    if plan is not None and plan.tensor_parallel is not None:
        inside, above = read_structure(copied).modules, f"{name}." if name else ""
        for one in plan.tensor_parallel.divisions:
            if one.module == name or one.module.startswith(above):
                module = inside[one.module.removeprefix(above) if one.module != name else ""]
                setattr(_torch.unwrapped(module), one.attribute, one.before)
    return copied


def _whole(tensor: Tensor, left: bool) -> Tensor:
    if left:
        value = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    else:
        value = tensor.detach().clone() if tensor.is_meta else gather(tensor)
    if not isinstance(tensor, nn.Parameter):
        return value
    return nn.Parameter(value, requires_grad=tensor.requires_grad)


def _finish(module: nn.Module, copied: nn.Module, hooks: dict[str, Any], memo: dict[int, Any]) -> None:
    """Remove from a copied module what preparation has added."""
    held = vars(copied)
    for key, value in vars(module).items():
        if key in hooks:
            kind = type(value)
            held[key] = kind(copy.deepcopy(hooks[key], memo))
        elif key in held and _is_added(module, key, value):
            del held[key]
    record = prepared.of(module)
    if record is None:
        return
    if isinstance(record.forward, Layers) and record.forward.own is not None:
        held["forward"] = copy.deepcopy(record.forward.own, memo)
    if record.original_class is not None:
        copied.__class__ = record.original_class
        held.pop("process_group", None)


def _is_added(module: nn.Module, key: str, value: Any) -> bool:
    """Whether an attribute of a module is one that preparation has set."""
    if key == prepared.RECORD or str(key).startswith(_COMPOSABLE):
        return True
    return (
        callable(value) and hasattr(type(module), key) and not isinstance(value, nn.Module) and _ours(value)
    )


def _ours(function: Callable[..., Any]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None)
    return _is_library(function) or (code is not None and code.co_filename.startswith(_FILES))


def _is_library(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    where = getattr(hook, "__module__", None) or type(hook).__module__
    return str(where).startswith(_OF_LIBRARIES)
