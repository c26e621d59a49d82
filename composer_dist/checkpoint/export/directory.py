"""Puts an export into its directory when all is written, and writes everything in it except the weights.

The files are moved one by one, the index of the weights and `config.json` (of an adapter,
`adapter_config.json`) last: transformers and peft load nothing from a new directory before it is complete.
Over an earlier export, a process that is killed between two moves leaves files of both.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.distributed.ranks.process_group import world_and_rank
from composer_dist.errors import CheckpointRuntimeError
from composer_dist.structure.families import original_classes, quiet

_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
"""The names that transformers gives to weights."""
_TEMPORARY = ".export-"
"""How the temporary directory's name begins."""
_ADAPTER = re.compile(r"adapter_config\.json|adapter_model\.(safetensors|bin)")
"""The names that peft gives to the files of an adapter."""

_LAST = (Path("model.safetensors.index.json"), Path("adapter_config.json"), Path("config.json"))
"""The files without which the others are not found, in the order in which they are moved."""


@contextmanager
def staged(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary directory that rank 0 makes in `path`; its files are moved there at the end. A collective.

    A full disk or an error on any rank leaves the old files.

    Raises:
        CheckpointRuntimeError: rank 0 cannot write there.
    """
    with ExitStack() as stack:
        target = Path(path).absolute()
        place = ""
        with Agreement().together("the directory"):
            if world_and_rank()[1] == 0:
                with written(path):
                    target.mkdir(parents=True, exist_ok=True)
                    for left in target.glob(f"{_TEMPORARY}*/"):  # by an export that was killed
                        shutil.rmtree(left)
                    place = stack.enter_context(tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=target))
        directory = Path(Agreement().reach("the directory", place, lambda found: found[0]))
        yield directory
        with Agreement().together("the end of the export"):
            if world_and_rank()[1] == 0:
                with written(path):
                    _replace(directory, target)
                    stack.close()  # now, so that no rank sees the temporary directory afterwards


@contextmanager
def written(path: str | os.PathLike[str]) -> Iterator[None]:
    """Inside, errors of the file system name `path`."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointRuntimeError(f"export_pretrained cannot write {path}: {error}") from error


def write_settings(model: Any, directory: Path, untying: Sequence[Any], dtype: torch.dtype | None) -> None:
    """Write what transformers saves in addition to the weights.

    Args:
        untying: the configurations, of the model and in it, that must not ask for ties.
        dtype: of the stored weights; None: as the model has them.
    """
    with original_classes(model.modules()), _as_stored(model, untying), quiet(), written(directory.parent):
        model.save_pretrained(directory, state_dict={})
        if dtype is not None:
            file = directory / "config.json"
            name = str(dtype).removeprefix("torch.")
            settings = json.loads(
                file.read_text(),
                object_hook=lambda one: one | dict.fromkeys(one.keys() & {"dtype", "torch_dtype"}, name),
            )
            file.write_text(json.dumps(settings, indent=2) + "\n")


@contextmanager
def _as_stored(model: Any, untying: Sequence[Any]) -> Iterator[None]:
    """Inside, a model's attributes and configuration match the stored model."""
    held = [(vars(one), dict(vars(one))) for one in (model.config, model, *untying)]
    try:
        vars(model)["_hf_peft_config_loaded"] = False  # otherwise transformers would write the adapter
        for config in untying:
            config.tie_word_embeddings = False
        yield
    finally:
        for now, before in held:
            now.clear()
            now.update(before)


def _replace(staging: Path, path: Path) -> None:
    """Move the new files over the old ones and remove weights of an earlier export.

    transformers prefers a `model.safetensors` to an index, so a stale one would be read instead. It also
    applies an adapter that it finds next to a model. Both are gone when the new index arrives.
    """
    written = {file.relative_to(staging) for file in staging.rglob("*") if file.is_file()}
    for file in written.difference(_LAST):
        (path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.move(staging / file, path / file)
    has_adapter = any(_ADAPTER.fullmatch(file.name) for file in written)
    for old in path.iterdir():
        stale = _WEIGHTS.fullmatch(old.name) or (_ADAPTER.fullmatch(old.name) and not has_adapter)
        if stale and old.relative_to(path) not in written:
            old.unlink()
    for file in filter(written.__contains__, _LAST):
        shutil.move(staging / file, path / file)
