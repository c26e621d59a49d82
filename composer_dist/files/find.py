"""Finds a model's tensors and extra state in safetensors files, our checkpoints and files of `torch.save`."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from composer_dist.errors import CheckpointError, CheckpointRuntimeError, CheckpointValueError
from composer_dist.files.checkpoint_format import METADATA, NAME, Manifest, StoredFile, decode
from composer_dist.files.checksums import check_ours
from composer_dist.files.index import Entry, Index, Pieces, check_inside, read_text
from composer_dist.files.other_libraries import model_in
from composer_dist.files.read import Files, read_values
from composer_dist.files.safetensors import read_index, read_places
from composer_dist.files.torch_save import index_of, load_object, read_seal, read_torch_file
from composer_dist.structure.names import is_extra_state
from composer_dist.wording import listed

Weights = tuple[Index, list[StoredFile]]
"""The index of the tensors, and the files' checksums, if they have any."""
_OLDER = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""The names that transformers gave to files of `torch.save`, or to their index, before safetensors."""


def index_weights(path: Path) -> Weights:
    """The index of every tensor of a model, and the checksums of our own files.

    Args:
        path: a directory or file of transformers (safetensors, or `pytorch_model.bin`), peft or
            `save_checkpoint`; or a file of `torch.save` with a model's state, also one of Composer, Fabric or
            Lightning.

    Raises:
        CheckpointValueError: the file does not exist, is damaged, or does not have exactly one model.
        CheckpointRuntimeError: a file cannot be read.
    """
    try:
        if (path / NAME).is_file():
            return _of_checkpoint(path)
        found = _older(path)
        if found.is_file() and found.name.endswith(".bin.index.json"):
            return _of_indexed_files(found), []
        if found.is_file() and found.suffix != ".safetensors" and not found.name.endswith(".index.json"):
            return _of_file(found)
    except OSError as error:
        raise CheckpointRuntimeError(f"Cannot read {error.filename or path}: {error.strerror}.") from error
    return read_index(path), []


def read_extra_state(path: Path) -> dict[str, Any]:
    """The extra state in a checkpoint or a file that `index_weights` accepts, by name, read on this rank.

    Raises:
        CheckpointValueError: it holds objects that could run code, or is damaged.
        CheckpointRuntimeError: a file cannot be read.
    """
    if (file := path if (path / NAME).is_file() else _older(path)).is_file():
        model = _model_of(file, values=True)
        return {name: deepcopy(value) for name, value in model.items() if is_extra_state(name)}
    manifest, key = _manifest_of(path)
    index = manifest.index(str(path))
    with Files(path, index.files) as files:

        def read(tag: str, at: str) -> Any:
            if tag == "tensor":
                return read_values(index.tensors[at], index.entries, files)
            place = manifest.objects[at]
            return load_object(files.bytes_of(place.file, place.offset, place.nbytes), f"{at} of {path}")

        try:
            stored = manifest.values(key, str(path))
            return {name: decode(code, read) for name, code in stored if is_extra_state(name)}
        except CheckpointError:
            raise
        except Exception as error:  # any value may have any type
            raise CheckpointValueError(
                f"{path / NAME} is corrupt ({type(error).__name__}: {error})."
            ) from error


def _of_checkpoint(path: Path) -> Weights:
    manifest, key = _manifest_of(path)
    return manifest.index(str(path), key), manifest.files


def _manifest_of(path: Path) -> tuple[Manifest, str]:
    """A checkpoint's manifest, and the key of its only model."""
    mark = path / NAME
    check_inside(path, [NAME])
    manifest = Manifest.of_text(read_text(mark), str(mark))
    check_inside(path, [file.name for file in manifest.files])
    models = [key for key, kind in manifest.kinds.items() if kind == "model"]
    if len(models) != 1:
        raise CheckpointValueError(
            f"{path} has {len(models)} models ({', '.join(models) or 'none'}), but exactly one is needed; "
            "load_checkpoint loads them by key."
        )
    return manifest, models[0]


def _older(path: Path) -> Path:
    """The files of `torch.save` in a directory of transformers without safetensors; else the path itself."""
    if not path.is_dir() or any(path.glob("*.safetensors*")):
        return path
    known = [name for name in _OLDER if (path / name).is_file()]
    check_inside(path, [*known, METADATA])
    check_ours(path, read_text(path / METADATA) if (path / METADATA).is_file() else None)
    return path / known[0] if known else path


def _of_indexed_files(path: Path) -> Index:
    """The files of `torch.save` that an index names."""
    sizes: list[tuple[str, int]] = []
    entries: dict[str, Entry] = {}
    pieces: dict[str, Pieces] = {}
    for number, (file, named) in enumerate(read_places(path, "torch.save").items()):
        contents = read_torch_file(path.parent / file)
        found = contents if isinstance(contents, Mapping) else {}
        if absent := sorted(named - found.keys()):
            raise CheckpointValueError(
                f"The index puts {listed(absent)} in {file}, but that file does not have them."
            )
        index = index_of(path.parent / file, _tensors({name: found[name] for name in named}))
        sizes.append((file, index.files[0][1]))
        entries |= {name: replace(entry, file=number) for name, entry in index.entries.items()}
        pieces |= index.pieces or {}
    return Index(str(path.parent), tuple(sizes), entries, pieces=pieces)


def _of_file(path: Path) -> Weights:
    seal, model = read_seal(path), _model_of(path)
    extra = tuple(name for name in model if is_extra_state(name))
    return replace(index_of(path, _tensors(model)), extra=extra), [seal] if seal else []


def _model_of(path: Path, values: bool = False) -> Mapping[str, Any]:
    """The only model in a file of `torch.save`."""
    model = model_in(read_torch_file(path, values=values))
    if model is None:
        raise CheckpointValueError(
            f"{path} has no model or several, but exactly one is needed; load_checkpoint loads them by key."
        )
    return model


def _tensors(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """A model's tensors, without its extra state."""
    return {
        name: one for name, one in state.items() if isinstance(one, torch.Tensor) and not is_extra_state(name)
    }
