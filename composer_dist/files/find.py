"""Finds a model's tensors in safetensors files, our checkpoints and files of `torch.save`."""

from pathlib import Path

from composer_dist.errors import CheckpointRuntimeError, CheckpointValueError
from composer_dist.files.checkpoint_format import NAME, Manifest, StoredFile
from composer_dist.files.index import Index, check_inside, read_text
from composer_dist.files.other_libraries import model_in
from composer_dist.files.safetensors import read_index
from composer_dist.files.torch_save import index_of, read_seal, read_torch_file

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


def _of_checkpoint(path: Path) -> Weights:
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
    return manifest.index(str(path), models[0]), manifest.files


def _of_file(path: Path) -> Weights:
    seal = read_seal(path)
    model = model_in(read_torch_file(path))
    if model is None:
        raise CheckpointValueError(
            f"{path} has no model or several, but exactly one is needed; load_checkpoint loads them by key."
        )
    tensors = {name: value for name, value in model.items() if hasattr(value, "untyped_storage")}
    return index_of(path, tensors), [seal] if seal else []
