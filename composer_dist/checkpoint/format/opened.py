"""Opens checkpoints and verifies them.

`Opened` is the same for our directories, our single files, and the files of other libraries.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composer_dist.checkpoint.format import dcp
from composer_dist.checkpoint.format.state_tree import Leaves, encode, is_plain
from composer_dist.checkpoint.storage.local import resolve
from composer_dist.checkpoint.storage.place import place_of
from composer_dist.errors import CheckpointRuntimeError, CheckpointValueError
from composer_dist.files.checkpoint_format import (
    DATA_FILE,
    NAME,
    Kind,
    Manifest,
    StoredFile,
    StoredObject,
    decode,
)
from composer_dist.files.checksums import check_ours, unseal, verify
from composer_dist.files.index import Index, check_inside
from composer_dist.files.read import Files, open_files, read_values
from composer_dist.files.torch_save import index_of, load_object, read_seal, read_torch_file
from composer_dist.tensors.blueprint import Blueprint


@dataclass
class Opened:
    """A checkpoint before any tensor is read."""

    where: str
    """A path or URL for errors."""
    root: Path | str
    """The directory of the files, or its URL."""
    sharded: bool
    """Whether it is a directory instead of a file."""
    index: Index
    """Every tensor by its path, joined with dots."""
    structure: dict[str, Any]
    """Each key to its encoded value."""
    kinds: dict[str, Kind]
    """As recorded; empty for files."""
    stored: list[StoredFile] = field(default_factory=list)
    """Files with checksums; other libraries' files have none."""
    objects: dict[str, Any] = field(default_factory=dict)
    """By path: the objects, or their places in files."""
    allow_pickle: bool = False

    def __post_init__(self) -> None:
        self.tensors: dict[str, Blueprint] = self.index.tensors

    def files(self) -> Files:
        """Open the files."""
        return open_files(self.root, self.index.files)

    def digest(self) -> str:
        """A hash that is equal on ranks that see the same checkpoint."""
        facts = [[name, size] for name, size in self.index.files], [f.checksums for f in self.stored]
        return sha256(repr((facts, self.structure)).encode()).hexdigest()

    def verify(self, part: int, parts: int) -> None:
        """Compare one of several parts of all bytes with their checksums.

        Raises:
            CheckpointValueError: they differ; names the file.
        """
        if self.sharded and part == 0:
            metadata = place_of(self.where).read(dcp.NAME)
            if metadata is None or unseal(metadata) is None:
                raise CheckpointValueError(
                    f"{self.where}/{dcp.NAME} is corrupt or truncated. Load an earlier checkpoint."
                )
            named = set(DATA_FILE.findall(metadata.decode("latin-1")))
            # A save that was killed leaves the next checkpoint's, with its files, until the next save.
            if named != {file.name for file in self.stored} and not all(map(place_of(self.where).has, named)):
                raise CheckpointValueError(
                    f"{self.where}/{dcp.NAME} belongs to another checkpoint: it names files that do not "
                    "exist. Load an earlier checkpoint."
                )
        with self.files() as files:
            verify(files, self.stored, part, parts)

    def value(self, code: Any) -> Any:
        """The value of a part of the structure, read in full on this rank alone.

        Tensors that are stored once become one tensor, so that they take no more memory than the files.
        """
        known: dict[Any, Tensor] = {}

        def read(tag: str, path: str) -> Any:
            key = self._place(path) if tag == "tensor" else None
            if key is None or key not in known:
                value = self._leaf(tag, path, files)
                return value if key is None else known.setdefault(key, value)
            return known[key]

        with self.files() as files:
            return decode(code, read)

    def _place(self, path: str) -> Any:
        """What a tensor consists of: where in the files, and in which shape."""
        made = self.tensors[path]
        boxes = ((self.index.entries[box.source], replace(box, source="")) for box in made.boxes)
        return made.dims, made.dtype, *boxes

    def described(self, code: Any, paths: dict[int, str]) -> Any:
        """The value with tensors on the meta device, whose paths are noted in `paths` by identity."""

        def read(tag: str, path: str) -> Any:
            if tag == "tensor":
                stored = self.tensors[path]
                tensor = torch.empty(tuple(stored.shape), dtype=stored.dtype, device="meta")
                paths[id(tensor)] = path
                return tensor
            with self.files() as files:
                return self._leaf(tag, path, files)

        return decode(code, read)

    def read(self, value: Any, paths: Mapping[int, str]) -> Any:
        """The values of a tensor from `described`; anything else is returned unchanged."""
        if isinstance(value, Tensor) and id(value) in paths:
            with self.files() as files:
                return self._tensor(paths[id(value)], files)
        return value

    def _leaf(self, tag: str, path: str, files: Files) -> Any:
        if tag == "tensor":
            return self._tensor(path, files)
        place = self.objects[path]
        return self._object(path, place, files) if isinstance(place, StoredObject) else deepcopy(place)

    def _tensor(self, path: str, files: Files) -> Tensor:
        return read_values(self.tensors[path], self.index.entries, files)

    def _object(self, path: str, place: StoredObject, files: Files) -> Any:
        data = files.bytes_of(place.file, place.offset, place.nbytes)
        return load_object(data, f"{path} of {self.where}", self.allow_pickle)


def open_checkpoint(where: str, allow_pickle: bool = False) -> Opened:
    """Read a checkpoint's manifest or the structure of its file.

    Raises:
        CheckpointValueError: it is not a checkpoint, is incomplete, or is damaged.
        CheckpointRuntimeError: it cannot be read.
    """
    place = place_of(where)
    if not isinstance(place.path, Path):
        return _open_directory(where, where, allow_pickle)
    path = resolve(place.path)
    try:
        if path.is_dir():
            return _open_directory(str(path), path, allow_pickle)
        if path.is_file():
            return _open_file(path, allow_pickle)
    except OSError as error:
        raise CheckpointRuntimeError(f"Cannot read {error.filename or path}: {error.strerror}.") from error
    raise CheckpointValueError(f"There is no checkpoint {path}.")


def _open_directory(where: str, root: Path | str, allow_pickle: bool) -> Opened:
    place = place_of(where)
    if isinstance(root, Path):
        check_inside(root, [NAME, dcp.NAME])
    mark = place.read(NAME)
    if mark is None:
        check_ours(where, place.read(dcp.NAME))
        hint = (
            " It contains checkpoints; pass one of them, or latest_checkpoint(...)." if place.inside() else ""
        )
        raise CheckpointValueError(
            f"{where} is not a valid checkpoint: it has no {NAME}, which is written last.{hint}"
        )
    manifest = Manifest.of_text(mark, f"{where}/{NAME}")
    if isinstance(root, Path):
        check_inside(root, [file.name for file in manifest.files])
    leaves: dict[str, set[str]] = {"tensor": {*manifest.tensors}, "object": {*manifest.objects}}
    try:
        for code in manifest.structure.values():
            decode(code, lambda tag, path: leaves[tag].remove(path))
    except Exception as error:  # any value may have any type
        raise CheckpointValueError(
            f"{where}/{NAME} is corrupt: its structure names values twice or that it does not have, or has "
            f"another format ({type(error).__name__}: {error!s:.200}). Load an earlier checkpoint."
        ) from error
    index, objects = manifest.index(where), dict(manifest.objects)
    facts = (manifest.structure, manifest.kinds, manifest.files)
    return Opened(where, root, True, index, *facts, objects, allow_pickle)


def _open_file(path: Path, allow_pickle: bool) -> Opened:
    seal = read_seal(path)
    contents = read_torch_file(path, allow_pickle)
    if not isinstance(contents, Mapping):
        raise CheckpointValueError(
            f"{path} contains a {type(contents).__name__}, not a mapping of a checkpoint's keys. Load it "
            "with torch.load, and save a state_dict() with torch.save."
        )
    leaves = Leaves()
    try:
        structure = {str(key): encode((str(key),), value, leaves) for key, value in contents.items()}
    except CheckpointValueError as error:
        raise CheckpointValueError(f"{path}: {error}") from error
    if not all(is_plain(one) for one in leaves.objects.values()):  # a tuple may hold tensors
        leaves.objects = _objects_of(path, allow_pickle)
    index, stored = index_of(path, leaves.tensors), [seal] if seal else []
    return Opened(str(path), path.parent, False, index, structure, {}, stored, leaves.objects, allow_pickle)


def _objects_of(path: Path, allow_pickle: bool) -> dict[str, Any]:
    """A file's objects, by path, with the values of tensors inside them."""
    leaves = Leaves()
    for key, value in read_torch_file(path, allow_pickle, values=True).items():
        encode((str(key),), value, leaves)
    return leaves.objects
