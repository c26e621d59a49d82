"""Process groups, collectives and meshes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

# The store behind the default process group: ranks agree through it, because a store answers where a
# collective would hang on a dead peer. Since torch 2.0.
from torch.distributed.distributed_c10d import Store as Store

# The group that an operation of the dispatcher names. Since torch 2.2.
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

# The switch that says whether torch's ring attention expects the balanced order of positions; the public
# context manager around the ring has no argument for it. Since torch 2.4, at this path since 2.6.
from torch.distributed.tensor.experimental._attention import _cp_options

get_default_store = distributed_c10d._get_default_store

# The collectives on whole tensors, which torch 2.13 has renamed; the old names warn there.
_before_2_13 = not hasattr(torch.distributed, "all_gather_single")
all_gather_single: Callable[..., Any] = getattr(
    torch.distributed, "all_gather_into_tensor" if _before_2_13 else "all_gather_single"
)
reduce_scatter_single: Callable[..., Any] = getattr(
    torch.distributed, "reduce_scatter_tensor" if _before_2_13 else "reduce_scatter_single"
)

# Collectives that return a new tensor; there is no public way to call them. Since torch 2.2.


def all_reduced(tensor: torch.Tensor, group: str) -> torch.Tensor:
    """The sum of `tensor`, contiguous, over the ranks of the group of this name."""
    functional: Any = torch.ops._c10d_functional
    return _waited(functional.all_reduce(tensor, "sum", group))


def all_gathered(tensor: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """The tensors of all ranks, contiguous and alike, one after the other along dimension 0."""
    functional: Any = torch.ops._c10d_functional
    return _waited(functional.all_gather_into_tensor(tensor, size, group))


def reduce_scattered(tensor: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """This rank's part, along dimension 0, of the sum of `tensor`, contiguous, over the ranks."""
    functional: Any = torch.ops._c10d_functional
    return _waited(functional.reduce_scatter_tensor(tensor, "sum", size, group))


def _waited(tensor: torch.Tensor) -> torch.Tensor:
    functional: Any = torch.ops._c10d_functional
    waited: torch.Tensor = functional.wait_tensor(tensor)
    return waited


def group_of_collective(operation: Any, arguments: Sequence[Any]) -> torch.distributed.ProcessGroup | None:
    """The group over which an operation of the dispatcher communicates, if it does.

    The objects of torch.distributed's collectives are boxed; functional ones name their group. Since
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
    """How long a collective of the default group may take: what `init_process_group` was given.

    Backends keep it in their options, to which there is no public way. Since torch 2.6.
    """
    group = torch.distributed.group.WORLD
    backends = [group._get_backend(device) for device in group._device_types] if group else []
    return max((backend.options._timeout for backend in backends), default=timedelta(minutes=30))


# Meshes cut and joined: FSDP2 shards over data and context parallel ranks together, and wants a part of
# the mesh whose other parts tensor parallelism uses. Slicing by a flattened name is deprecated in favor of
# keeping the flattened mesh, which only these make. `_flatten` since torch 2.5, `_concatenate` since 2.10.


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """A mesh of several dimensions as one of a single dimension; the same one at every call."""
    return mesh._flatten(name)


def concatenate_meshes(*meshes: DeviceMesh) -> DeviceMesh:
    """The mesh with the dimensions of several disjoint parts of one mesh, over the parts' groups."""
    return DeviceMesh._concatenate(list(meshes))


def clear_dtensor_caches() -> None:
    """Forgets the meshes that DTensor's sharding propagation has seen; called on `destroy`.

    The caches are keyed by equality of meshes, which leaves out the groups, and hand back the mesh
    they saw first. After `destroy_process_group` and a new `init_process_group` an equal mesh has
    groups of other names, so the first redistribution fails or talks to the wrong ranks. Torch's own
    tests call this for the same reason. In torch 2.11 to 2.13 it clears the C++ cache too.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


@contextmanager
def ring_attention(mesh: DeviceMesh, length: int, balanced: bool) -> Iterator[None]:
    """Inside, scaled-dot-product attention is torch's ring over the ranks of `mesh` (1-D).

    Torch's context also cuts tensors, one of them at least, from which it reads the sequence's length.
    """
    from torch.distributed.tensor.experimental import context_parallel

    before = _cp_options.enable_load_balance
    _cp_options.enable_load_balance = balanced
    lengthwise = torch.empty(length, device=mesh.device_type)
    try:
        with context_parallel(
            mesh, buffers=[lengthwise], buffer_seq_dims=[0], no_restore_buffers={lengthwise}
        ):
            yield
    finally:
        _cp_options.enable_load_balance = before
