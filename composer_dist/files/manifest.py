"""What a checkpoint says about itself: which files it has, and where in them every tensor lies.

A sharded checkpoint is a directory in the format of torch.distributed.checkpoint, whose files hold each
piece of a tensor as `torch.save` writes it. `checkpoint.json` beside them is ours. It is written last, so
that a directory that has one is complete; it gives the size and checksums of every file, where the raw
bytes of every piece begin, and the structure of all that was saved; and it ends in a checksum of itself.
Reading it needs no pickle.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import torch

from composer_dist.errors import CheckpointValueError
from composer_dist.files.index import Entry, Index, Pieces, dtype_named
from composer_dist.tensors.parts import Dims, contiguous_strides
from composer_dist.wording import dtype_name

NAME = "checkpoint.json"
"""The file in the directory of a checkpoint."""

VERSION = 1

BLOCK = 16 << 20
"""Bytes of a file that have a checksum of their own, so that several threads and ranks share the work."""

Kind = Literal["model", "optimizer", "value"]

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class StoredFile:
    """A file as it was written."""

    name: str
    nbytes: int
    checksums: tuple[int, ...]
    """CRC-32 of each block of bytes."""
    block: int = BLOCK
    """Bytes of a block; the last one may be shorter."""


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, row-major, uncompressed, somewhere in a file."""

    start: Dims
    sizes: Dims
    file: int
    """Number of the file in `Manifest.files`."""
    offset: int
    """Where the first element lies, in bytes."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor, made of chunks that do not overlap."""

    dtype: torch.dtype
    shape: Dims
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class StoredObject:
    """Something else, as `torch.save` writes it."""

    file: int
    offset: int
    nbytes: int


@dataclass
class Manifest:
    """Everything about a checkpoint but the bytes of its tensors."""

    files: list[StoredFile] = field(default_factory=list)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    """By path, joined with dots."""
    objects: dict[str, StoredObject] = field(default_factory=dict)
    kinds: dict[str, Kind] = field(default_factory=dict)
    """What each key of the checkpoint was saved from."""
    structure: dict[str, Any] = field(default_factory=dict)
    """Each key to what was there, as `composer_dist.checkpoint.format.structure` encodes it."""
    facts: dict[str, Any] = field(default_factory=dict)
    """When it was saved, by how many ranks, with which versions."""

    def to_text(self) -> str:
        """The contents of `checkpoint.json`."""
        body = {
            "version": VERSION,
            "facts": self.facts,
            "kinds": self.kinds,
            "files": [[f.name, f.nbytes, f.checksums] for f in self.files],
            "tensors": {
                name: [dtype_name(t.dtype), t.shape, [[c.start, c.sizes, c.file, c.offset] for c in t.chunks]]
                for name, t in self.tensors.items()
            },
            "objects": {name: [o.file, o.offset, o.nbytes] for name, o in self.objects.items()},
            "structure": self.structure,
        }
        text = _dump(body)
        return _dump({"crc32": zlib.crc32(text.encode()), "checkpoint": body}) + "\n"

    @classmethod
    def of_text(cls, text: bytes, source: str) -> Manifest:
        """The inverse of `to_text`.

        Raises:
            CheckpointValueError: a byte was changed or lost, or it is of a later version; names `source`.
        """
        try:
            read = json.loads(text)
            body = read["checkpoint"]
            sealed = read["crc32"] == zlib.crc32(_dump(body).encode()) and _dump(read) + "\n" == text.decode()
        except (ValueError, KeyError, TypeError, RecursionError):
            sealed = False
        if not sealed:
            raise CheckpointValueError(f"{source} is corrupt or truncated: checksum mismatch.")
        if body["version"] > VERSION:
            raise CheckpointValueError(
                f"{source} is of version {body['version']}, this composer_dist reads up to {VERSION}; update."
            )
        return cls(
            [StoredFile(name, nbytes, tuple(sums)) for name, nbytes, sums in body["files"]],
            {
                name: StoredTensor(
                    dtype_named(dtype),
                    tuple(shape),
                    tuple(Chunk(tuple(start), tuple(sizes), file, at) for start, sizes, file, at in chunks),
                )
                for name, (dtype, shape, chunks) in body["tensors"].items()
            },
            {name: StoredObject(*place) for name, place in body["objects"].items()},
            body["kinds"],
            body["structure"],
            body["facts"],
        )

    def index(self, root: str, key: str | None = None) -> Index:
        """The tensors below a key, by their names there, for reading slices of them; None means all."""
        entries: dict[str, Entry] = {}
        pieces: dict[str, Pieces] = {}
        prefix = "" if key is None else f"{key}."
        for path, tensor in self.tensors.items():
            if not path.startswith(prefix):
                continue
            name = path.removeprefix(prefix)
            pieces[name] = (tensor.shape, tensor.dtype, [])
            for number, chunk in enumerate(tensor.chunks):
                entries[f"{name}#{number}"] = Entry(chunk.file, tensor.dtype, chunk.sizes, chunk.offset)
                strides = contiguous_strides(chunk.sizes)
                pieces[name][2].append((chunk.start, strides, f"{name}#{number}"))
        return Index(root, tuple((f.name, f.nbytes) for f in self.files), entries, pieces=pieces)

    def check_complete(self, source: str) -> None:
        """Refuse tensors whose chunks do not add up to them.

        Raises:
            CheckpointValueError: names them.
        """
        if lacking := list(self._lacking()):
            raise CheckpointValueError(f"{source} lacks parts of {', '.join(lacking)}.")

    def _lacking(self) -> Iterator[str]:
        for name, tensor in self.tensors.items():
            if sum(prod(chunk.sizes) for chunk in tensor.chunks) != prod(tensor.shape):
                yield name


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
