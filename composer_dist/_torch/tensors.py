"""Tensors: the parts of DTensors, operations on lists, storages, versions and hooks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from weakref import WeakMethod

import torch
from torch.distributed import utils
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, placement_types

# The parts of a DTensor, with which existing memory becomes a DTensor without a copy (`DTensor.from_local`
# copies a shard in host memory to the mesh's device). Since torch 2.0.
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

# Applies a function to all values of one type in nested data. Since torch 1.13.
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from composer_dist.errors import ParallelismRuntimeError

Key = TypeVar("Key")

# Divides gradients and detects infinities in one pass; torch.amp.GradScaler uses it. Since torch 1.10.
amp_foreach_non_finite_check_and_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_

# Fused elementwise kernels for lists of tensors. torch.nn.utils.clip_grad uses them, but has no argument for
# the dtype of a norm. `dtype=` since torch 2.2.
foreach_lerp_, foreach_mul_, foreach_norm = torch._foreach_lerp_, torch._foreach_mul_, torch._foreach_norm

# The placement of a dimension with several equal groups that are cut separately, such as query, key and value
# in one matrix. FSDP2 uses it for other purposes. Since torch 2.5.
StridedShard = placement_types._StridedShard

# Applies a function to every tensor in a module's nested output, as FSDP2 does to cast it. Since torch 1.13.
apply_to_tensors = utils._apply_to_tensors


class Noted(torch.Tensor):
    """A number that notes what is computed with it, apart from moving or casting it.

    Results are ordinary tensors. `DisableTorchFunctionSubclass` since torch 2.0.
    """

    _read: ClassVar[list[Any]] = []

    @classmethod
    @contextmanager
    def noting(cls) -> Iterator[list[Any]]:
        """A list of the functions that read such numbers while the body runs."""
        cls._read = []
        yield cls._read

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = (*args, *(kwargs or {}).values())
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func in _VALUES or any(isinstance(one, torch.Tensor) and type(one) is not cls for one in given):
            cls._read.append(func)
            return result
        return result.as_subclass(cls) if isinstance(result, torch.Tensor) else result


_VALUES = {getattr(torch.Tensor, name) for name in ("item", "tolist", "__int__", "__float__", "__bool__")}


def storage_key(tensor: torch.Tensor) -> int:
    """A key that tensors with the same storage share, also on the meta device. Since torch 2.0."""
    return int(tensor.untyped_storage()._cdata)


def version(tensor: torch.Tensor) -> int:
    """The number of in-place changes of a tensor and of those that share its memory. Since torch 0.4."""
    return 0 if tensor.is_inference() else tensor._version


def versions(tensors: Mapping[Key, torch.Tensor]) -> dict[Key, int]:
    """The `version` of each."""
    return {key: 0 if one.is_inference() else one._version for key, one in tensors.items()}


def which_are_true(flags: Mapping[Key, torch.Tensor | None]) -> list[Key]:
    """The keys of booleans `()` that are true, for which this waits once for each of their devices."""
    by_device: dict[torch.device, dict[Key, torch.Tensor]] = {}
    for key, flag in flags.items():
        if flag is not None:
            by_device.setdefault(flag.device, {})[key] = flag
    found: list[Key] = []
    for flags in by_device.values():
        values = torch.stack([*flags.values()]).tolist()
        found += [key for key, is_true in zip(flags, values, strict=True) if is_true]
    return found


def preserve_version(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Inside, in-place changes of `tensor` are not counted. Since torch 2.1."""
    preserved: AbstractContextManager[None] = torch.autograd.grad_mode._unsafe_preserve_version_counter(
        tensor
    )
    return preserved


def without_memory(
    cls: type[torch.Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Any:
    """A tensor of a subclass that has a shape, but no elements. Since torch 1.11."""
    made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
    vars(made)[_WITHOUT_MEMORY] = True
    return made


_WITHOUT_MEMORY = "_composer_dist_without_memory"


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is not from `without_memory`."""
    return _WITHOUT_MEMORY not in vars(tensor)


def is_view(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a view of another for autograd. Since torch 0.4."""
    return tensor._base is not None


MARK = "_is_param"
"""The attribute by which `nn.Parameter` marks tensors of other classes. Since torch 1.12."""


def gradient_hooks(tensor: torch.Tensor) -> list[Callable[..., Any]]:
    """The hooks from `register_hook`. Since torch 0.2."""
    return list(tensor._backward_hooks.values()) if tensor._backward_hooks else []


def accumulated_gradient_hooks(tensor: torch.Tensor) -> list[Callable[..., Any]]:
    """The hooks from `register_post_accumulate_grad_hook`. Since torch 2.1."""
    return list((getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values())


def hooks_by_id(tensor: torch.Tensor) -> Sequence[dict[int, Callable[..., Any]]]:
    """The hooks of both kinds, as autograd reads them, by the `id` of their handles. Since torch 2.1."""
    return tensor._backward_hooks or {}, getattr(tensor, "_post_accumulate_grad_hooks", None) or {}


def hook_output(
    tensor: torch.Tensor, hook: Callable[[torch.Tensor], None], leaves: WeakTensorKeyDictionary
) -> None:
    """Register a gradient hook on an output of a forward.

    Args:
        leaves: those that have it. A forward may return a parameter, which is the same tensor each time.
    """
    if tensor not in leaves:
        handle = tensor.register_hook(hook)
        if tensor.is_leaf:
            leaves[tensor] = handle


def while_alive(method: Callable[[Any], None]) -> Callable[[Any], None]:
    """A hook that calls a method while its object is alive.

    Python finds no cycles that go through the hooks of `register_post_accumulate_grad_hook`, or through the
    parameters of DDP's reducer: a model that they hold would stay in memory.
    """
    found = WeakMethod(method)

    def hook(tensor: torch.Tensor) -> None:
        if (alive := found()) is not None:
            alive(tensor)

    return hook


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` without its autograd history, with shared memory and version, so that changes are detected.

    In a dispatch mode, a plain `detach` does not share the version. Since torch 2.1; torch's own selective
    checkpointing does the same.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def as_dtensor(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], parts: int) -> DTensor:
    """`local` as a DTensor of `parts` times as many rows, without copies and communication."""
    shape = torch.Size([*(rows * parts for rows in local.shape[:1]), *local.shape[1:]])
    meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), local.dtype)
    return DTensor(local, DTensorSpec(mesh, tuple(placements), meta), requires_grad=False)


def local_box(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and first corner of a DTensor's local part, as DTensor computes them. Since torch 2.2."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)


@contextmanager
def without_values() -> Iterator[None]:
    """Inside, `torch.load` returns tensors with a place in the file instead of memory. Since torch 2.7."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        yield


class _Archive(BytesIO):
    """An archive of `torch.save` without the bytes of its tensor."""

    gap = -1
    """Where they belong."""

    def seek(self, offset: int, whence: int = 0) -> int:
        """Note the place instead: torch skips the bytes that it does not write."""
        self.gap = self.tell()
        return self.gap


def archive_around(tensor: torch.Tensor) -> tuple[bytes, bytes]:
    """What `torch.save` writes before and after a tensor's bytes: the same for a dtype and a shape.

    The archive's own checksum of the tensor is 0, which `torch.load` does not read. Since torch 2.6.
    """
    archive = _Archive()
    with torch.serialization.skip_data():
        torch.save(tensor, archive)
    written = archive.getvalue()
    if archive.gap < 0:
        raise ParallelismRuntimeError(f"torch {torch.__version__} does not skip data; report it, please.")
    return written[: archive.gap], written[archive.gap :]


def pickle_and_byte_order(source: Path | BytesIO) -> tuple[bytes, str]:
    """The pickle of a `torch.save` archive, as `torch.load` finds it, and its byte order. Since torch 2.1."""
    with nullcontext(source) if isinstance(source, BytesIO) else source.open("rb") as file:
        file.seek(0)
        reader: Any = torch._C.PyTorchFileReader(file)
        order = reader.get_record("byteorder").decode() if reader.has_record("byteorder") else "little"
        found = reader.get_record("data.pkl"), order
        file.seek(0)
        return found


def offset_in_file(tensor: torch.Tensor) -> int:
    """The offset in its file, in bytes, of the storage of a tensor that was loaded `without_values`."""
    return int(tensor.untyped_storage()._checkpoint_offset or 0)


def storage_info(path: str, offset: int, length: int) -> Any:
    """`torch.distributed.checkpoint`'s record, in `.metadata`, of an item's place. Since torch 2.0."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(path, offset, length)


def is_freed(tensor: torch.Tensor) -> bool:
    """Whether FSDP2 has freed the memory under an ordinary tensor. Since torch 2.0."""
    tensor = _unwrapped(tensor)
    return _is_ordinary(tensor) and tensor.untyped_storage().size() == 0 < tensor.numel()


def is_of(tensor: torch.Tensor, param: Any) -> bool:
    """Whether an ordinary tensor has the memory of an `FSDPParam` as it is gathered. Since torch 2.4."""
    tensor, keys = _unwrapped(tensor), [storage_key(one) for one in param.all_gather_outputs]
    return _is_ordinary(tensor) and storage_key(tensor) in keys


def _unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """What the transforms of torch.func have wrapped. Since torch 2.1."""
    while type(tensor) is torch.Tensor and torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def _is_ordinary(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and not tensor.is_meta
    )
