"""The index of weight files: every tensor's file, offset, shape and dtype.

One rank reads the headers of the files, but no tensors, and sends the index to the others.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from reprlib import repr

import torch

from composer_dist.errors import CheckpointValueError
from composer_dist.tensors.blueprint import Blueprint, Box
from composer_dist.tensors.parts import Dims
from composer_dist.wording import dtype_name, human_bytes

_MOST_DIMENSIONS = 64
"""torch's own limit for most functions."""
_MOST_ELEMENTS = 1 << 59
"""Their bytes can be counted in 64 bits."""
_MOST_TENSORS = 500_000
"""The largest models of 2026 have less than half of this; each takes about 0.1 ms."""
_LONGEST_NAME = 1000
_MOST_TEXT = 1 << 30
"""Bytes; 10,000 tensors in 1,000 pieces each take half of this."""


@dataclass(frozen=True)
class Entry:
    """A tensor in a file."""

    file: int
    """Number of the file in `Index.files`."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """In bytes from the beginning of the file."""

    @property
    def nbytes(self) -> int:
        """Its size."""
        return prod(self.shape) * self.dtype.itemsize


Pieces = tuple[Dims, torch.dtype, list[tuple[Dims, Dims, str]]]
"""A tensor's shape and dtype, and each piece's start, strides in the file and entry."""


@dataclass(frozen=True)
class Index:
    """The tensors of a checkpoint."""

    root: str
    """The directory of the files, on the rank that read the headers."""
    files: tuple[tuple[str, int], ...]
    """Name and size in bytes of each file."""
    entries: dict[str, Entry]
    header_bytes: int = 0
    """Bytes that were read to build the index."""
    pieces: dict[str, Pieces] | None = None
    """Tensors that are stored in pieces, by name; None if every entry is a whole tensor."""
    extra: tuple[str, ...] | None = None
    """Names of modules' extra state; None if such files cannot have any."""

    @property
    def tensors(self) -> dict[str, Blueprint]:
        """Every tensor by name, as a blueprint over the entries."""
        if self.pieces is None:
            return {name: Blueprint.stored(name, one.shape, one.dtype) for name, one in self.entries.items()}
        found = {}
        for name, (shape, dtype, parts) in self.pieces.items():
            stored = [(one, self.entries[one[2]]) for one in parts]
            boxes = [Box(at, start, one.shape, 0, step) for (start, step, at), one in stored if one.nbytes]
            found[name] = Blueprint.made_of(boxes, shape, dtype)
        return found

    @property
    def adapter(self) -> bool:
        """Whether peft wrote it."""
        return self.files[0][0] == "adapter_model.safetensors"

    def pack(self) -> str:
        """The index as one line of text, to send to other ranks."""
        entries = {n: [e.file, dtype_name(e.dtype), e.shape, e.offset] for n, e in self.entries.items()}
        pieces = {n: [shape, dtype_name(dtype), at] for n, (shape, dtype, at) in (self.pieces or {}).items()}
        text = json.dumps([self.root, self.files, entries, pieces, self.extra])
        return base64.b64encode(zlib.compress(text.encode())).decode()

    @classmethod
    def unpack(cls, packed: str) -> Index:
        """The inverse of `pack`, without `header_bytes`."""
        root, files, entries, pieces, extra = json.loads(zlib.decompress(base64.b64decode(packed)))
        found = {
            name: Entry(file, dtype_named(dtype), tuple(shape), offset)
            for name, (file, dtype, shape, offset) in entries.items()
        }
        joined = {
            name: (
                tuple(shape),
                dtype_named(dtype),
                [(tuple(at), tuple(step), one) for at, step, one in parts],
            )
            for name, (shape, dtype, parts) in pieces.items()
        }
        extra = None if extra is None else tuple(extra)
        return cls(root, tuple(map(tuple, files)), found, pieces=joined or None, extra=extra)


def read_text(path: Path) -> bytes:
    """The contents of an index or another list of what is in a checkpoint.

    Raises:
        CheckpointValueError: it is too large to be one.
    """
    check_size(str(path), path.stat().st_size)
    return path.read_bytes()


def check_size(source: str, nbytes: int) -> None:
    """Raise unless a list of what is in a checkpoint may have so many bytes."""
    if nbytes > _MOST_TEXT:
        raise CheckpointValueError(
            f"{source} has {human_bytes(nbytes)}; at most {human_bytes(_MOST_TEXT)} are supported."
        )


def check_count(source: str, tensors: int) -> None:
    """Raise unless a model may have so many tensors."""
    if tensors > _MOST_TENSORS:
        raise CheckpointValueError(f"{source} has {tensors} tensors; at most {_MOST_TENSORS} are supported.")


def check_limits(source: str, name: str, shape: Sequence[int]) -> None:
    """Check that a tensor is possible, and not so unusual that reading its entry could take long.

    Raises:
        CheckpointValueError: the name is too long, or the shape is not one of torch's.
        TypeError: the shape is not a sequence.
    """
    if len(name) > _LONGEST_NAME:
        raise CheckpointValueError(
            f"{source}: the name {name[:40]!r}... has {len(name)} characters; the limit is {_LONGEST_NAME}."
        )
    possible = len(shape) <= _MOST_DIMENSIONS and all(type(size) is int and size >= 0 for size in shape)
    if not possible or prod(size or 1 for size in shape) >= _MOST_ELEMENTS:
        what = repr(shape) if len(shape) <= _MOST_DIMENSIONS else f"{len(shape)} dimensions"
        raise CheckpointValueError(f"{source}: {name!r} cannot have the shape {what}.")


def check_inside(directory: Path, names: Iterable[str]) -> None:
    """Check that files in a directory, if they exist, are regular ones and not links that lead out of it.

    In the Hugging Face Hub's cache, `snapshots/<commit>/<file>` may be a link to a file in `blobs`.

    Raises:
        CheckpointValueError: names the link or the file.
    """
    home = directory.resolve()
    caches = [above.parent / "blobs" for above in home.parents if above.name == "snapshots"]
    for name in names:
        try:
            real = (directory / name).resolve()
        except (RuntimeError, ValueError) as error:  # a link to itself; a character that no name may have
            raise CheckpointValueError(f"There can be no file {name!r} in {directory}: {error}.") from error
        if not any(real.is_relative_to(one) for one in (home, *caches)):
            raise CheckpointValueError(
                f"{directory / name} is a link that leads out of its directory, to {real}. If you trust it, "
                "replace it by a copy of that file."
            )
        if real.exists() and not real.is_file():
            raise CheckpointValueError(f"{directory / name} is not a regular file.")


def dtype_named(name: str, source: str = "The checkpoint") -> torch.dtype:
    """The inverse of `dtype_name`; raises if this torch has no such dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or name.startswith("q"):  # quantized: bytes alone make no tensor
        raise CheckpointValueError(
            f"{source} has tensors of dtype {name!r}, which no tensor of this torch can have."
        )
    return dtype
