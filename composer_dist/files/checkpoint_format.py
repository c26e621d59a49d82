"""The format of a checkpoint: what its shard files contain, and the manifest that lists it.

A sharded checkpoint is a directory in the format of torch.distributed.checkpoint. Each rank writes one file,
which contains its pieces of tensors and its other values one after the other, each as `torch.save` writes it.
`checkpoint.json`, the manifest, is our addition. It is written last, so a directory that has one is complete.
It lists the size and checksums of every file, the offset of every piece's raw bytes, the structure of the
saved state, and its own checksum. Reading it needs no pickle.
"""

from __future__ import annotations

import json
import re
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, get_args

import torch

from composer_dist.errors import CheckpointError, CheckpointValueError
from composer_dist.files.index import Entry, Index, Pieces, check_count, check_limits, check_size, dtype_named
from composer_dist.structure.names import is_extra_state
from composer_dist.tensors.parts import Dims, contiguous_strides, covers
from composer_dist.wording import dtype_name, listed

NAME = "checkpoint.json"
METADATA = ".metadata"
"""The file that torch.distributed.checkpoint reads first; ours ends in its checksum."""
DATA_FILE = re.compile(r"__[0-9]{1,9}_[0-9a-f]{8}\.distcp")
"""Names of data files; the end is the token of one save. No other file of a checkpoint is read or removed."""
VERSION = 1
BLOCK = 16 << 20
"""Bytes per checksum of a file, so that several threads and ranks share the work."""
START = 1 << 10
"""Bytes of a manifest that `saved_at` needs."""
_TIME = re.compile(
    rb'\{"crc32":[0-9]{1,10},"checkpoint":\{"version":[0-9]+,"facts":\{"time":([0-9]{1,12}(\.[0-9]+)?)[,}]'
)
_SEALED = re.compile(rb'\{"crc32":([0-9]{1,10}),"checkpoint":(.*)\}\n', re.DOTALL)
Kind = Literal["model", "optimizer", "value"]
KeyPath = tuple[str | int, ...]
DICTS = {"dict": dict, "ordered": OrderedDict}
"""Tags of mappings in an encoded structure."""


@dataclass(frozen=True)
class StoredFile:
    """A file's size and checksums when it was written."""

    name: str
    nbytes: int
    checksums: tuple[int, ...]
    """CRC-32 of each block of bytes."""
    block: int = BLOCK
    """Bytes of a block; the last one may be shorter."""

    @property
    def consistent(self) -> bool:
        """Whether there is a checksum for every block."""
        checked = _are_natural(self.nbytes, self.block, *self.checksums) and self.block > 0
        return checked and len(self.checksums) == -(-self.nbytes // self.block)


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, row-major and uncompressed, in a file."""

    start: Dims
    sizes: Dims
    file: int
    """Number of the file in `Manifest.files`."""
    offset: int
    """Of the first element, in bytes."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that consists of chunks that do not overlap."""

    dtype: torch.dtype
    shape: Dims
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class StoredObject:
    """Another value, as `torch.save` writes it."""

    file: int
    offset: int
    nbytes: int


@dataclass
class Manifest:
    """Everything about a checkpoint except the bytes of its tensors."""

    files: list[StoredFile] = field(default_factory=list)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    """By path, joined with dots."""
    objects: dict[str, StoredObject] = field(default_factory=dict)
    kinds: dict[str, Kind] = field(default_factory=dict)
    """The kind of each key's value."""
    structure: dict[str, Any] = field(default_factory=dict)
    """Each key's value, as `composer_dist.checkpoint.format.state_tree` encodes it."""
    facts: dict[str, Any] = field(default_factory=dict)
    """When it was saved, by how many ranks, with which versions."""

    def to_text(self) -> str:
        """The contents of `checkpoint.json`.

        Raises:
            CheckpointValueError: `of_text` would refuse them for their size.
        """
        check_count("The checkpoint", len(self.tensors) + len(self.objects))
        for name, tensor in self.tensors.items():
            check_limits("The checkpoint", name, tensor.shape)
        body = {
            "version": VERSION,
            "facts": self.facts,  # first, for `saved_at`
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
        text = _dump({"crc32": zlib.crc32(text.encode()), "checkpoint": body}) + "\n"
        check_size(NAME, len(text))
        return text

    @classmethod
    def of_text(cls, text: bytes, source: str) -> Manifest:
        """The inverse of `to_text`.

        Raises:
            CheckpointValueError: it is corrupt, contradicts itself, or is of a later version; names `source`.
        """
        sealed = _SEALED.fullmatch(text)
        try:
            body = json.loads(sealed[2]) if sealed and int(sealed[1]) == zlib.crc32(sealed[2]) else None
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            raise CheckpointValueError(f"{source} is corrupt or truncated: checksum mismatch.")
        try:
            if body["version"] > VERSION:
                raise CheckpointValueError(
                    f"{source} has version {body['version']!s:.100}, but this composer_dist reads only up to "
                    f"version {VERSION}; update composer_dist."
                )
            found = cls._of_body(body, source)
            faults = list(found._faults())
        except CheckpointError:
            raise
        except Exception as error:  # any value may have any type
            faults = [f"it does not have the format of a checkpoint ({type(error).__name__}: {error!s:.200})"]
        if faults:
            raise CheckpointValueError(f"{source} is corrupt: {listed(faults)}. Load an earlier checkpoint.")
        return found

    @classmethod
    def _of_body(cls, body: dict[str, Any], source: str) -> Manifest:
        check_count(source, len(body["tensors"]) + len(body["objects"]))
        tensors = {}
        for name, (dtype, shape, chunks) in body["tensors"].items():
            check_limits(f"{source} is corrupt", name, shape)
            boxes = tuple(Chunk(tuple(start), tuple(sizes), *at) for start, sizes, *at in chunks)
            tensors[name] = StoredTensor(dtype_named(dtype, source), tuple(shape), boxes)
        files = [StoredFile(name, nbytes, tuple(checksums)) for name, nbytes, checksums in body["files"]]
        objects = {name: StoredObject(*place) for name, place in body["objects"].items()}
        return cls(files, tensors, objects, body["kinds"], body["structure"], body["facts"])

    def _faults(self) -> Iterator[str]:
        """What cannot be true of a checkpoint that was saved."""
        for file in self.files:
            if not DATA_FILE.fullmatch(file.name):
                yield f"{file.name!r:.100} is not the name of a file of this checkpoint"
            elif not file.consistent:
                yield f"the checksums of {file.name} do not match its size"
        if len({file.name for file in self.files}) < len(self.files):
            yield "it names a file twice"
        for name, tensor in self.tensors.items():
            if any(len(one.sizes) != len(tensor.shape) for one in tensor.chunks):
                yield f"parts of {name} have other dimensions than it has"
            elif not all(self._has(one, prod(one.sizes) * tensor.dtype.itemsize) for one in tensor.chunks):
                yield f"parts of {name} are not in its files"
            elif not covers(((one.start, one.sizes) for one in tensor.chunks), tensor.shape):
                yield f"the parts of {name} overlap, are missing or are outside of it"
        stored = dict.fromkeys(self.tensors.values())  # tied tensors are stored once
        if sum(prod(one.shape) * one.dtype.itemsize for one in stored) > sum(
            file.nbytes for file in self.files if file.consistent
        ):
            yield "its tensors are larger than its files"
        yield from (
            f"{name} is not in its files"
            for name, one in self.objects.items()
            if not (_are_natural(one.nbytes) and self._has(one, one.nbytes))
        )
        if self.kinds.keys() != self.structure.keys() or not {*self.kinds.values()} <= {*get_args(Kind)}:
            yield "its kinds are not those of its keys"
        if not isinstance(self.facts.get("time", 0.0), float | int):
            yield "its time is not a number"

    def _has(self, place: Chunk | StoredObject, nbytes: int) -> bool:
        """Whether so many bytes at a place are in its file."""
        numbers = (*place.start, *place.sizes) if isinstance(place, Chunk) else ()
        inside = _are_natural(place.file, place.offset, *numbers) and place.file < len(self.files)
        return inside and place.offset + nbytes <= self.files[place.file].nbytes

    def index(self, root: str, key: str | None = None) -> Index:
        """The index of the tensors below a key, by their names there; None means all.

        Below a key, the parts of extra state are entries, so that they are verified, but not tensors.
        """
        entries: dict[str, Entry] = {}
        pieces: dict[str, Pieces] = {}
        prefix = "" if key is None else f"{key}."
        for path, tensor in self.tensors.items():
            if not path.startswith(prefix):
                continue
            name = path.removeprefix(prefix)
            if key is None or not is_extra_state(name):
                pieces[name] = (tensor.shape, tensor.dtype, [])
            for number, chunk in enumerate(tensor.chunks):
                entries[f"{name}#{number}"] = Entry(chunk.file, tensor.dtype, chunk.sizes, chunk.offset)
                strides = contiguous_strides(chunk.sizes)
                if name in pieces:
                    pieces[name][2].append((chunk.start, strides, f"{name}#{number}"))
        files, extra = tuple((f.name, f.nbytes) for f in self.files), None
        if key is not None:
            below = {p.removeprefix(prefix): one for p, one in self.objects.items() if p.startswith(prefix)}
            entries |= {n: Entry(o.file, torch.uint8, (o.nbytes,), o.offset) for n, o in below.items()}
            extra = tuple(name for name, _ in self.values(key, root) if is_extra_state(name))
        return Index(root, files, entries, pieces=pieces, extra=extra)

    def values(self, key: str, where: str) -> list[tuple[str, Any]]:
        """The names below a key, and the encoded values; `where` is the checkpoint, for errors."""
        try:
            ((tag, pairs),) = self.structure[key].items()
            return [(str(name), code) for name, code in pairs if tag in DICTS]
        except (AttributeError, TypeError, ValueError) as error:  # any value may have any type
            raise CheckpointValueError(f"{key} is not a model's state in {where}.") from error


def decode(code: Any, read: Callable[[str, str], Any]) -> Any:
    """A value from its code, as `composer_dist.checkpoint.format.state_tree.encode` makes it.

    Args:
        read: returns a leaf from its tag ("tensor" or "object") and path.
    """
    ((tag, inner),) = code.items()
    if tag == "plain":
        return inner
    if tag == "list":
        return [decode(one, read) for one in inner]
    if tag in DICTS:
        return DICTS[tag]((key, decode(one, read)) for key, one in inner)
    return read(tag, inner)


def saved_at(start: bytes) -> float | None:
    """When a checkpoint was saved, in seconds since 1970, by the start of its manifest; None if unknown."""
    found = _TIME.match(start)
    return float(found[1]) if found else None


def _are_natural(*numbers: Any) -> bool:
    return all(type(one) is int and one >= 0 for one in numbers)


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
