"""Finds a model's tensors in safetensors files, our checkpoints and files of `torch.save`.

Modules' extra state, which is whatever `get_extra_state` returned, is read here too.
"""

import io
import pickle
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from composer_dist.errors import CheckpointError, CheckpointRuntimeError, CheckpointValueError
from composer_dist.files.checkpoint_format import NAME, Manifest, StoredFile, StoredObject, decode
from composer_dist.files.index import Index, check_inside, read_text
from composer_dist.files.other_libraries import model_in
from composer_dist.files.read import Files, read_slabs
from composer_dist.files.safetensors import read_index
from composer_dist.files.slabs import plan_reads
from composer_dist.files.torch_save import index_of, load, read_seal, read_torch_file, refusal
from composer_dist.structure.names import is_extra_state
from composer_dist.tensors.parts import Part

Weights = tuple[Index, list[StoredFile]]
"""The index of the tensors, and the files' checksums, if they have any."""


def index_weights(path: Path) -> Weights:
    """The index of every tensor of a model, and the checksums of our own files.

    Args:
        path: a directory or file of transformers, peft or `save_checkpoint`; or a file of `torch.save`
            with a model's state, also one of Composer, Fabric or Lightning.

    Raises:
        CheckpointValueError: the file does not exist, is damaged, or does not have exactly one model.
        CheckpointRuntimeError: a file cannot be read.
    """
    try:
        if (path / NAME).is_file():
            return _of_checkpoint(path)
        if path.is_file() and path.suffix != ".safetensors" and not path.name.endswith(".index.json"):
            return _of_file(path)
    except OSError as error:
        raise CheckpointRuntimeError(f"Cannot read {error.filename or path}: {error.strerror}.") from error
    return read_index(path), []


def read_extra_state(path: Path) -> dict[str, Any]:
    """The extra state in a checkpoint or a file that `index_weights` accepts, by name, read on this rank.

    Raises:
        CheckpointValueError: it holds objects that could run code, or is damaged.
        CheckpointRuntimeError: a file cannot be read.
    """
    if path.is_file():
        model = _model_of(path, values=True)
        return {name: deepcopy(value) for name, value in model.items() if is_extra_state(name)}
    manifest, key = _manifest_of(path)
    index = manifest.index(str(path))
    with Files(path, index.files) as files:

        def read(tag: str, at: str) -> Any:
            if tag == "tensor":
                return read_whole(index, at, files)
            return read_object(f"{at} of {path}", manifest.objects[at], files)

        try:
            return {name: decode(code, read) for name, code in manifest.values(key) if is_extra_state(name)}
        except CheckpointError:
            raise
        except Exception as error:  # any value may have any type
            raise CheckpointValueError(
                f"{path / NAME} is corrupt ({type(error).__name__}: {error})."
            ) from error


def read_whole(index: Index, name: str, files: Files) -> torch.Tensor:
    """A stored tensor, in full."""
    blueprint = index.tensors[name]
    dims = blueprint.dims
    whole = torch.empty(dims, dtype=blueprint.dtype)
    part = Part(dims, tuple((0, size) for size in dims), 0, prod(dims))
    read_slabs(list(plan_reads(blueprint, index.entries, part, whole.view(-1))), files)
    return whole


def read_object(what: str, place: StoredObject, files: Files, allow_pickle: bool = False) -> Any:
    """A stored object, which errors call `what`.

    Raises:
        CheckpointValueError: it could run code, or is damaged.
    """
    buffer = torch.empty(place.nbytes, dtype=torch.uint8)
    files.read(place.file, place.offset, [(buffer.data_ptr(), place.nbytes)])
    data = io.BytesIO(buffer.numpy().tobytes())
    try:
        return load(data, allow_pickle)
    except pickle.UnpicklingError as error:
        raise CheckpointValueError(
            f"{what} is an object that could run code: {refusal(error)} If you trust the checkpoint's "
            "source, pass allow_pickle=True to load_checkpoint."
        ) from error
    except CheckpointValueError as error:
        raise CheckpointValueError(f"{what} {error}") from error
    except Exception as error:  # torch has several for what is not an archive
        raise CheckpointValueError(f"{what} is corrupt: {refusal(error)}") from error


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


def _of_file(path: Path) -> Weights:
    seal, model = read_seal(path), _model_of(path)
    extra = tuple(name for name in model if is_extra_state(name))
    tensors = {
        name: value for name, value in model.items() if isinstance(value, torch.Tensor) and name not in extra
    }
    return replace(index_of(path, tensors), extra=extra), [seal] if seal else []


def _model_of(path: Path, values: bool = False) -> Mapping[str, Any]:
    """The only model in a file of `torch.save`."""
    model = model_in(read_torch_file(path, values=values))
    if model is None:
        raise CheckpointValueError(
            f"{path} has no model or several, but exactly one is needed; load_checkpoint loads them by key."
        )
    return model
