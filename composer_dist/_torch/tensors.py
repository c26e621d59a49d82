"""Tensors: DTensors and what they are made of, many at once, storages, versions and hooks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import utils
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, placement_types

# What a DTensor is made of: the one way to look at memory that is there as a DTensor without moving it
# (`DTensor.from_local` copies a shard in host memory to the mesh's device). Since torch 2.0.
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

# Applies a function to what is of one type in an operation's results. Since torch 1.13.
from torch.utils._pytree import tree_map_only as tree_map_only

# Divides gradients and notes infinities in one pass; torch.amp.GradScaler uses it. Since torch 1.10.
amp_foreach_non_finite_check_and_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_

# Fused elementwise kernels over lists of tensors; torch.nn.utils.clip_grad uses them, and offers no
# public way to ask for the dtype of a norm. `dtype=` since torch 2.2.
foreach_lerp_, foreach_mul_, foreach_norm = torch._foreach_lerp_, torch._foreach_mul_, torch._foreach_norm

# How DTensor says that a dimension is cut in several equal groups, each by itself: query, key and value in
# one matrix. FSDP2 has its own use for it. Since torch 2.5.
StridedShard = placement_types._StridedShard

# Applies a function to every tensor in a module's output, however it is nested; FSDP2 casts outputs with
# it. Since torch 1.13.
apply_to_tensors = utils._apply_to_tensors


def storage_key(tensor: torch.Tensor) -> int:
    """The same for tensors that share a storage, on the meta device too. Since torch 2.0."""
    return int(tensor.untyped_storage()._cdata)


def version(tensor: torch.Tensor) -> int:
    """How often a tensor, or one that shares its memory, was changed in place. Since torch 0.4."""
    return tensor._version


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd knows a tensor as a view of another. Since torch 0.4."""
    return tensor._base is not None


def gradient_hooks(tensor: torch.Tensor) -> list[Callable[..., Any]]:
    """What `register_hook` was given. Since torch 0.2."""
    return list((tensor._backward_hooks or {}).values())


def accumulated_gradient_hooks(tensor: torch.Tensor) -> list[Callable[..., Any]]:
    """What `register_post_accumulate_grad_hook` was given. Since torch 2.1."""
    return list((getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values())


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` without its autograd history, sharing memory and version: a change in place shows.

    Beneath autograd, as in a dispatch mode, a plain `detach` shares no version. Since torch 2.1; torch's
    own selective checkpointing does the same.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def as_dtensor(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], parts: int) -> DTensor:
    """`local`, where it is, as a DTensor of `parts` times as many rows; nothing is copied or sent."""
    shape = torch.Size([*(rows * parts for rows in local.shape[:1]), *local.shape[1:]])
    meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), local.dtype)
    return DTensor(local, DTensorSpec(mesh, tuple(placements), meta), requires_grad=False)


def local_box(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and first corner of a DTensor's local part, by DTensor's own account. Since torch 2.2."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)


@contextmanager
def without_values() -> Iterator[None]:
    """Inside, `torch.load` makes tensors without memory that know their place in the file. Since 2.7."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        yield


def offset_in_file(tensor: torch.Tensor) -> int:
    """Where the storage of a tensor that was loaded `without_values` begins in its file, in bytes."""
    return int(tensor.untyped_storage()._checkpoint_offset or 0)


def storage_info(path: str, offset: int, length: int) -> Any:
    """How `torch.distributed.checkpoint` notes where an item lies, inside of `.metadata`. Since torch 2.0."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(path, offset, length)
