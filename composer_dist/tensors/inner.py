"""The inner tensors of a tensor whose class has a codec; other tensors are used as they are."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from composer_dist import _torch
from composer_dist.errors import ParallelismValueError
from composer_dist.tensors.codec import TensorCodec, codecs
from composer_dist.tensors.torchao import torchao_codec


@dataclass(frozen=True)
class Inner:
    """The facts about an inner tensor."""

    name: str
    shape: tuple[int, ...]
    """In the whole tensor, not in a shard."""
    dtype: torch.dtype
    rows: bool
    """Whether it follows the rows."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def codec_of(tensor: Tensor) -> TensorCodec | None:
    """The codec of a tensor, or of a DTensor's shards; None for plain tensors and classes without one."""
    cls = type(tensor)
    if cls is Tensor or cls is nn.Parameter:
        return None
    if issubclass(cls, DTensor):
        return codec_of(local_part(tensor))
    if cls not in codecs and (known := torchao_codec(cls)) is not None:
        codecs[cls] = known
    return codecs.get(cls)


def inner_tensors(tensor: Tensor) -> dict[str, Tensor]:
    """A tensor's inner tensors, sharing its memory: DTensors for a DTensor; {} if it has no codec."""
    codec = codec_of(tensor)
    if codec is None:
        return {}
    local = local_part(tensor)
    found = {name: inner.detach() for name, inner in codec.flatten(local)[0].items()}
    if isinstance(tensor, DTensor):
        mesh, rows = tensor.device_mesh, local.shape[0]
        cut = (tensor.placements, tensor.shape[0] // rows if rows else 1)
        whole = ([Replicate()] * mesh.ndim, 1)
        for name, inner in found.items():
            found[name] = _torch.as_dtensor(inner, mesh, *(cut if name in codec.rows else whole))
    return found


def describe_inner(tensor: Tensor) -> tuple[Inner, ...]:
    """The facts about a tensor's inner tensors; () if it has no codec."""
    codec = codec_of(tensor)
    if codec is None:
        return ()
    return tuple(
        Inner(name, tuple(inner.shape), inner.dtype, name in codec.rows)
        for name, inner in inner_tensors(tensor).items()
    )


@torch.no_grad()
def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def rebuild(tensor: Tensor, inner: Mapping[str, Tensor], shape: torch.Size) -> Tensor:
    """A tensor like `tensor`, or like its shards, with other inner tensors; its class has a codec."""
    codec = _known(tensor)
    return codec.unflatten(inner, codec.flatten(local_part(tensor))[1], shape)


def empty_like(
    tensor: Tensor, device: torch.device | str, parts: int = 1, pin_memory: bool = False
) -> Tensor:
    """An uninitialized tensor of the same class: the whole, or one of `parts` equal parts of its rows."""

    def part(shape: torch.Size) -> torch.Size:
        return torch.Size((shape[0] // parts, *shape[1:]))

    rows, inner = _known(tensor).rows, {}
    for name, value in inner_tensors(tensor).items():
        size = part(value.shape) if name in rows else value.shape
        inner[name] = torch.empty(size, dtype=value.dtype, device=device, pin_memory=pin_memory)
    return rebuild(tensor, inner, part(tensor.shape))


def dense(tensor: Tensor) -> Tensor:
    """The value of a tensor as a plain tensor."""
    codec = codec_of(tensor)
    return tensor.detach() if codec is None else codec.to_dense(tensor.detach())


def encoded(full: Tensor, like: Tensor) -> Tensor:
    """A full tensor converted to the class and settings of `like`.

    Args:
        full: the value, dense or not, on any device; returned unchanged if `like` has no codec.
        like: a tensor of the model: full, or sharded.

    Raises:
        ParallelismValueError: `from_dense` returns other inner tensors than those of `like`.
    """
    codec = codec_of(like)
    if codec is None:
        return full
    wanted, local = describe_inner(like), local_part(like)
    if describe_inner(full) != wanted or type(full) is not type(local):
        device = full.device if local.device.type in {"meta", "cpu"} else local.device
        full = codec.from_dense(dense(full).to(device, like.dtype), local)
        if (got := describe_inner(full)) != wanted:
            raise ParallelismValueError(
                f"The codec's from_dense returns a {type(full).__name__} with {list(got)}, but the model has "
                f"a {type(local).__name__} with {list(wanted)}."
            )
    return full


@torch.no_grad()
def encode_into(tensor: Tensor, value: Tensor) -> None:
    """Copy the value of a plain tensor into a tensor, which may have a codec."""
    if codec_of(tensor) is None:
        tensor.copy_(value)
        return
    made = _known(tensor).from_dense(value, tensor)
    for mine, new in zip(inner_tensors(tensor).values(), inner_tensors(made).values(), strict=True):
        mine.copy_(new)


def parts(name: str, tensor: Tensor, full: Tensor | None) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """A tensor's inner tensors, or the tensor itself, by name, each with its full value if `full` is given.

    Args:
        tensor: of the model.
        full: its value, of the same class.
    """
    inner = inner_tensors(tensor)
    if not inner:
        yield name, tensor, full
    values = {} if full is None else inner_tensors(full)
    for key, part in inner.items():
        yield f"{name}.{key}", part, values.get(key)


def as_floats(tensor: Tensor) -> Tensor:
    """A tensor in float32, dense and cut as before; only some ranks' parts may be quantized."""
    if not tensor.is_floating_point():
        return tensor
    local = dense(local_part(tensor)).float()
    return dtensor_like(local, tensor) if isinstance(tensor, DTensor) else local


def dtensor_like(local: Tensor, like: DTensor) -> DTensor:
    """A DTensor with another local tensor, cut like `like`."""
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def dtensor_of(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    """A contiguous DTensor of this full shape with the given local tensor."""
    size, stride = torch.Size(shape), torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=size, stride=stride)


def own_attributes(tensor: Tensor) -> dict[str, Any]:
    """The Python attributes that users have set on a tensor, without those of its class."""
    attributes = {name: value for name, value in vars(tensor).items() if name != _torch.MARK}
    if attributes and not isinstance(tensor, DTensor) and codec_of(tensor) is not None:
        made = vars(rebuild(tensor, inner_tensors(tensor), tensor.shape))
        attributes = {name: value for name, value in attributes.items() if name not in made}
    return attributes


def _known(tensor: Tensor) -> TensorCodec:
    codec = codec_of(tensor)
    assert codec is not None
    return codec
