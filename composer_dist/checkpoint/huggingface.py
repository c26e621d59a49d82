"""Directories that transformers and peft load unaided."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from composer_dist import _torch
from composer_dist.checkpoint.adapters import adapter_hosts, as_peft_names
from composer_dist.checkpoint.state import full_model_state
from composer_dist.distributed.agreement import Agreement
from composer_dist.distributed.process_group import world_and_rank
from composer_dist.distributed.summon import summon_full_params
from composer_dist.errors import CheckpointRuntimeError, ParallelismTypeError


def export_pretrained(
    model: nn.Module, path: str | os.PathLike[str], *, max_shard_size: int | str = "5GB"
) -> None:
    """Write what `AutoModel...from_pretrained`, or `PeftModel.from_pretrained`, reads; a collective.

    A model with adapters gives the adapter directory (one per adapter whose name is not "default",
    as peft does); any other a model directory of safetensors with its configuration and generation
    configuration. The tokenizer of a `HuggingFaceModel` lies beside it. Rank 0 gathers and writes;
    files of an earlier export are replaced once everything is written.

    Args:
        model: a `HuggingFaceModel`, or a transformers or peft model, prepared or not.
        path: a directory; made where there is none. Rank 0's counts.
        max_shard_size: bytes, or as "5GB": larger models are split into several files.

    Raises:
        ParallelismTypeError: `model` is none of these.
        CheckpointValueError: an adapter without tensors.
        CheckpointRuntimeError: rank 0 could not write; raised on every rank.
    """
    tokenizer = getattr(model, "tokenizer", None)
    saved = _pretrained(model)
    adapted = any(host is saved for _, host in adapter_hosts(saved))
    state = full_model_state(saved, select="adapters" if adapted else None)
    if adapted:
        state = as_peft_names(saved, state)
    with ExitStack() as stack:
        for prompts in _prompt_encoders(saved):
            # peft runs these to learn what to write, so they need their values, on every rank.
            stack.enter_context(summon_full_params(prompts, writeback=False))
        with Agreement().together("export_pretrained"):
            if world_and_rank()[1] == 0:
                _write(saved, state, tokenizer, Path(path), max_shard_size)


def _pretrained(model: nn.Module) -> nn.Module:
    """The transformers or peft model itself."""
    from transformers import PreTrainedModel

    from composer_dist.models.huggingface import HuggingFaceModel

    inner = model.model if isinstance(model, HuggingFaceModel) else model
    if isinstance(inner, PreTrainedModel) or _is_peft(inner):
        return inner
    raise ParallelismTypeError(
        "export_pretrained takes a HuggingFaceModel, a transformers or a peft model, not "
        f"{type(inner).__name__}; pass the part of your model that is one."
    )


def _is_peft(model: nn.Module) -> bool:
    import importlib.util

    if importlib.util.find_spec("peft") is None:
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel)


def _prompt_encoders(model: nn.Module) -> Iterator[nn.Module]:
    encoders = getattr(model, "prompt_encoder", None)
    if isinstance(encoders, nn.Module):
        yield encoders


def _write(
    model: Any, state: dict[str, Tensor], tokenizer: Any, path: Path, max_shard_size: int | str
) -> None:
    """Everything into a directory inside the target first, so that a full disk leaves no mixture."""
    from safetensors import SafetensorError

    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".export-", dir=path) as staging:
            with _original_classes(model):
                if _is_peft(model):
                    model.save_pretrained(staging, state_dict=state)
                else:
                    model.save_pretrained(staging, state_dict=state, max_shard_size=max_shard_size)
            if tokenizer is not None:
                tokenizer.save_pretrained(staging)
            _replace(Path(staging), path)
    except (OSError, SafetensorError) as error:
        raise CheckpointRuntimeError(f"export_pretrained could not write {path}: {error}") from error


def _replace(staging: Path, path: Path) -> None:
    """Move the new files over the old ones and remove weights of an earlier export.

    transformers prefers a `model.safetensors` to an index, so a stale one would be read instead.
    """
    written = {file.relative_to(staging) for file in staging.rglob("*") if file.is_file()}
    for file in written:
        (path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.move(staging / file, path / file)
    for stale in (*path.glob("model*.safetensors"), *path.glob("model.safetensors.index.json")):
        if stale.relative_to(path) not in written:
            stale.unlink()


@contextmanager
def _original_classes(model: nn.Module) -> Iterator[None]:
    """Inside, modules have the classes that the user gave them, without FSDP2's or DDP's in front.

    transformers and peft write class names into configurations.
    """
    prepared: list[tuple[nn.Module, type[nn.Module]]] = [
        (module, type(module))
        for module in model.modules()
        if isinstance(module, FSDPModule) or _torch.is_replicated(module)
    ]
    for module, cls in prepared:
        module.__class__ = _torch.original_class(cls)
    try:
        yield
    finally:
        for module, cls in prepared:
            module.__class__ = cls
