"""The index of weight files: every tensor's file, offset, shape and dtype.

One rank reads the headers of the files, but no tensors, and sends the index to the others.
"""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from composer_dist.errors import CheckpointValueError
from composer_dist.tensors.blueprint import Blueprint, Box
from composer_dist.tensors.parts import Dims
from composer_dist.wording import dtype_name


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
        text = json.dumps([self.root, self.files, entries, pieces])
        return base64.b85encode(zlib.compress(text.encode())).decode()

    @classmethod
    def unpack(cls, packed: str) -> Index:
        """The inverse of `pack`, without `header_bytes`."""
        root, files, entries, pieces = with_tuples(json.loads(zlib.decompress(base64.b85decode(packed))))
        found = {
            name: Entry(file, dtype_named(dtype), shape, offset)
            for name, (file, dtype, shape, offset) in entries.items()
        }
        parts = {name: (shape, dtype_named(dtype), list(at)) for name, (shape, dtype, at) in pieces.items()}
        return cls(root, files, found, pieces=parts or None)


def with_tuples(value: Any) -> Any:
    """A value from JSON with tuples in place of lists."""
    if isinstance(value, dict):
        return {key: with_tuples(one) for key, one in value.items()}
    return tuple(map(with_tuples, value)) if isinstance(value, list) else value


def dtype_named(name: str) -> torch.dtype:
    """The inverse of `dtype_name`; raises if this torch has no such dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointValueError(f"The checkpoint has tensors of dtype {name!r}, which this torch lacks.")
    return dtype
