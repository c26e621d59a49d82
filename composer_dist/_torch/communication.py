"""Process groups, collectives and meshes."""

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

# The store of the default process group, through which ranks agree: a collective would hang if a peer has
# died, the store does not. Since torch 2.0.
from torch.distributed.distributed_c10d import Store as Store

# The process group with a given name. Since torch 2.2.
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

# The option that makes torch's ring attention expect the balanced order of positions; the public context
# manager has no argument for it. Since torch 2.4, at this path since 2.6.
from torch.distributed.tensor.experimental._attention import _cp_options

get_default_store = distributed_c10d._get_default_store

# Collectives on whole tensors; torch 2.13 renamed them, and the old names warn.
_before_2_13 = not hasattr(torch.distributed, "all_gather_single")
all_gather_single: Callable[..., Any] = getattr(
    torch.distributed, "all_gather_into_tensor" if _before_2_13 else "all_gather_single"
)
reduce_scatter_single: Callable[..., Any] = getattr(
    torch.distributed, "reduce_scatter_tensor" if _before_2_13 else "reduce_scatter_single"
)

# Collectives that return a new tensor and have no public functions. Since torch 2.2.
_functional: Any = torch.ops._c10d_functional


def all_reduced(tensor: torch.Tensor, group: str) -> torch.Tensor:
    """The sum of a contiguous tensor over the ranks of the group with this name."""
    return _functional.wait_tensor(_functional.all_reduce(tensor, "sum", group))  # type: ignore[no-any-return]


def all_gathered(tensor: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """The contiguous tensors of all ranks, concatenated along dimension 0; all have the same shape."""
    gathered = _functional.all_gather_into_tensor(tensor, size, group)
    return _functional.wait_tensor(gathered)  # type: ignore[no-any-return]


def reduce_scattered(tensor: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """This rank's part, along dimension 0, of the sum of a contiguous tensor over the ranks."""
    part = _functional.reduce_scatter_tensor(tensor, "sum", size, group)
    return _functional.wait_tensor(part)  # type: ignore[no-any-return]


def group_of_collective(operation: Any, arguments: Sequence[Any]) -> torch.distributed.ProcessGroup | None:
    """The group of an operation of the dispatcher; None if the operation does not communicate.

    torch.distributed's collectives have the group as a boxed argument, functional ones have its name. Since
    torch 2.5.
    """
    if operation.namespace == "c10d":
        for argument in arguments:
            if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
                group = torch.distributed.ProcessGroup.unbox(argument)
                return _resolve_process_group(group.group_name)
    if operation.namespace == "_c10d_functional":
        names = [one.name for one in operation._schema.arguments]
        if "group_name" in names:
            return _resolve_process_group(arguments[names.index("group_name")])
    return None


def collective_timeout() -> timedelta:
    """The timeout of the default group's collectives, as given to `init_process_group`.

    It is in the backends' options, which are not public. Since torch 2.6.
    """
    group = torch.distributed.group.WORLD
    backends = [group._get_backend(device) for device in group._device_types] if group else []
    return max((backend.options._timeout for backend in backends), default=timedelta(minutes=30))


# FSDP2 shards over data and context parallel ranks together, and needs a part of the same mesh that tensor
# parallelism uses. Slicing by a flattened name is deprecated; only these functions return a flattened mesh to
# keep. `_flatten` since torch 2.5, `_concatenate` since 2.10.


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """A mesh with several dimensions as one with a single dimension; every call returns the same one."""
    return mesh._flatten(name)


def concatenate_meshes(*meshes: DeviceMesh) -> DeviceMesh:
    """A mesh with the dimensions and groups of several disjoint parts of one mesh."""
    return DeviceMesh._concatenate(list(meshes))


def clear_dtensor_caches() -> None:
    """Clear the meshes in the caches of DTensor; called on `destroy`.

    The caches compare meshes without their groups, and return the first equal mesh. After
    `destroy_process_group` and a new `init_process_group`, the groups of an equal mesh have other names, so
    the first redistribution would fail or communicate with the wrong ranks. Torch's own tests call this for
    the same reason. Since torch 2.11 it also clears the C++ cache. Two more caches hold meshes,
    whose groups' threads would keep running.
    """
    from torch.distributed.tensor._redistribute import _gen_transform_infos, clear_redistribute_planner_cache
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    _gen_transform_infos.cache_clear()
    clear_redistribute_planner_cache()


@contextmanager
def ring_attention(mesh: DeviceMesh, length: int, balanced: bool) -> Iterator[None]:
    """Inside, scaled-dot-product attention is torch's ring over the ranks of `mesh` (1-D).

    Torch's context reads the sequence's length from a tensor that it splits, so it gets an empty one.
    """
    from torch.distributed.tensor.experimental import context_parallel

    before = _cp_options.enable_load_balance
    _cp_options.enable_load_balance = balanced
    empty = torch.empty(length, device=mesh.device_type)
    try:
        with context_parallel(mesh, buffers=[empty], buffer_seq_dims=[0], no_restore_buffers={empty}):
            yield
    finally:
        _cp_options.enable_load_balance = before


def collectives_entered() -> dict[str, tuple[list[int], int]]:
    """For each process group that counts them its ranks, and how many collectives this rank has entered.

    Every backend of torch counts them, to compare them in debug mode. Since torch 1.10.
    """
    found: dict[str, tuple[list[int], int]] = {}
    groups: list[tuple[Any, Any]] = list(distributed_c10d._world.pg_group_ranks.items())
    for group, ranks in groups:
        with suppress(RuntimeError, ValueError):
            found[group.group_name] = sorted(ranks), group._get_sequence_number_for_group()
    return found


_quiet, _quiet_lock = 0, threading.Lock()


@contextmanager
def warnings_of_c10_off() -> Iterator[None]:
    """Inside, warnings that torch's C++ code logs are not printed; errors are.

    `TCPStore` logs a stack of C++ for every call whose connection closes, besides raising an error. Does
    nothing where libc10 does not have the level (Windows, a build with glog). Since torch 1.0.
    """
    global _quiet
    level = _level_of_c10()
    if level is None:
        yield
        return
    with _quiet_lock:
        _quiet += 1
        if _quiet == 1:
            level[1], level[0].value = level[0].value, max(level[0].value, 2)
    try:
        yield
    finally:
        with _quiet_lock:
            _quiet -= 1
            if _quiet == 0:
                level[0].value = level[1]


@cache
def _level_of_c10() -> list[Any] | None:
    """The lowest level of messages that are printed (1: warnings, 2: errors), and what it was before."""
    for path in Path(torch.__file__).parent.glob("lib/libc10.*"):
        with suppress(OSError, ValueError):
            level = ctypes.c_int.in_dll(ctypes.CDLL(str(path)), "FLAGS_caffe2_log_level")
            return [level, level.value]
    return None
