"""Loads pretrained weights into a model, and exports directories for transformers and peft."""

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from composer_dist.checkpoint.export.directory import staged, write_settings, written
from composer_dist.checkpoint.export.merged import base_sources, check_mergeable, merged_sources
from composer_dist.checkpoint.export.source import WeightSource
from composer_dist.checkpoint.export.weights import Export
from composer_dist.checkpoint.full_state import LoadResult, full_model_state
from composer_dist.checkpoint.kinds.filling import fill_model
from composer_dist.checkpoint.kinds.model import live_state
from composer_dist.distributed.mesh.mesh import Mesh
from composer_dist.distributed.moving.gather import BUCKET_BYTES
from composer_dist.distributed.prepared import (
    check_usable,
    mesh_of_world,
    prepared_mesh,
    reshard,
    usable_or_marked,
)
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.distributed.ranks.process_group import world_and_rank
from composer_dist.distributed.replication.replica import settle
from composer_dist.distributed.training.summon import summon_full_params
from composer_dist.distributed.weights.disk import Pretrained
from composer_dist.distributed.weights.initialize import find_components
from composer_dist.errors import CheckpointValueError, ParallelismTypeError, ParallelismValueError
from composer_dist.models.adapters import adapter_hosts, as_peft_names
from composer_dist.structure.families import is_a, original_classes
from composer_dist.structure.structure import read_structure
from composer_dist.users_code import warn


def load_pretrained(
    model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True, verify: bool = True
) -> LoadResult:
    """Load a model, prepared or not, from safetensors files or a checkpoint; every rank reads its own part.

    All ranks of the model's mesh call it. Shards and optimizers that hold them stay the same objects. If
    anything is refused, nothing is written.

    Args:
        model: sharded or not, on the meta device or not.
        path: a safetensors file; a directory of transformers, peft or `export_pretrained`; or a checkpoint of
            `save_checkpoint` or `torch.save`. An adapter is loaded into the model's adapter, after the base
            model, which also replaces the copies that peft trains (`modules_to_save`). Tied tensors may have
            any of their names. transformers' older names, and names from before the model was wrapped
            by peft, DDP, `torch.compile` or a `ComposerModel`, are matched too. Modules' extra state is set
            from checkpoints; safetensors files have none.
        strict: raise if names are missing or unexpected. Otherwise missing tensors are initialized if they
            are on the meta device, and keep their values if not.
        verify: first compare the model's bytes in a checkpoint of `save_checkpoint` with their checksums;
            every rank does a share. Other files have no checksums.

    Raises:
        CheckpointKeyError: `strict`, and names are missing or unexpected: all of them are listed.
        CheckpointValueError: shapes or dtypes do not match, or the files are corrupt.
        CheckpointRuntimeError: a file cannot be read; if reading had begun, the model is unusable.
    """
    reshard(model)
    structure = read_structure(model)
    mesh = mesh_of_world(model)
    agreement = Agreement(mesh.ranks if mesh is not None else None)
    pretrained = Pretrained.open(path, structure, agreement, strict, verify)
    if pretrained is None:
        raise ParallelismValueError(
            "The ranks' models have different structure: names, shapes, dtypes, frozen parameters or ties."
        )
    with agreement.together("the initializers"):
        lacking = {
            name
            for name, held in structure.tensors.items()
            if held.get().is_meta and name not in pretrained.names
        }
        if lacking:
            find_components(structure, lacking)
    if pretrained.match.stale:
        warn(pretrained.warnings()[-1])
    fill_model(model, structure, pretrained, lacking)
    with usable_or_marked(model):
        pretrained.set_extra_state()
    return LoadResult(pretrained.match.missing, pretrained.match.unexpected)


def export_pretrained(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    merge_adapters: bool = False,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a directory for `AutoModel...from_pretrained` or `PeftModel.from_pretrained`; a collective.

    A model with adapters is exported as an adapter directory (with a subdirectory for each adapter not named
    "default", as peft does), any other model as a directory of safetensors with its configuration and
    generation configuration. The tokenizer of a `HuggingFaceModel` is included.

    All ranks write the weights of a model directory at once, each from its own shards. Tensors that
    transformers computes for a checkpoint, and merged layers, are gathered one at a time. Adapters are
    gathered to rank 0. Files of an earlier export are replaced once everything is written.

    Args:
        model: a `HuggingFaceModel`, or a transformers or peft model, prepared or not.
        path: a directory, made if it does not exist. Rank 0's is used, and all ranks should see it:
            otherwise rank 0 warns, and gathers and writes everything.
        max_shard_size: bytes, or as "5GB": larger models are split into several files.
        merge_adapters: write a model directory with the active adapters merged into the weights by peft's
            own arithmetic. The model does not change.
        dtype: floating-point tensors are stored in it, and the configuration says so; None keeps their own.

    Raises:
        ParallelismTypeError: `model` is not one of these.
        ParallelismValueError: the ranks' models differ; another `dtype`.
        CheckpointValueError: an adapter has no tensors or cannot be merged, or there is nothing to merge.
        CheckpointRuntimeError: a rank could not write; raised on every rank.
    """
    _check_dtype(dtype)
    tokenizer = getattr(model, "tokenizer", None)
    saved = _pretrained(model)
    check_usable(model)
    reshard(saved)
    settle(model)
    hosts = dict(adapter_hosts(saved))
    adapted = any(host is saved for host in hosts.values())
    if merge_adapters and not adapted:
        raise CheckpointValueError("merge_adapters has nothing to merge: the model has no adapters.")
    if adapted and not merge_adapters:
        write = _adapters(saved, dtype)
    else:
        merged = hosts if merge_adapters else {}
        write = _model(saved, prepared_mesh(model), merged, max_shard_size, dtype)
    with staged(path) as directory:
        write(directory)
        with Agreement().together("export_pretrained"):
            if world_and_rank()[1] == 0 and tokenizer is not None:
                with written(path):
                    tokenizer.save_pretrained(directory)


def weight_source(
    model: nn.Module,
    *,
    merge_adapters: bool = True,
    dtype: torch.dtype | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> WeightSource:
    """The weights of a model that trains, for an inference engine, without writing files; a collective.

    They are those that `export_pretrained` would write: with transformers' names, tied tensors once, and
    adapters merged layer by layer from the shards, bit for bit. The model does not change.

    Args:
        model: a `HuggingFaceModel`, or a transformers or peft model, prepared or not.
        merge_adapters: give the model with its active adapters merged; False gives the weights without them.
        dtype: floating-point tensors are cast to it at the end; None keeps their own.
        bucket_bytes: most bytes that are gathered at a time, unless tensors that belong together have more.

    Raises:
        ParallelismTypeError: `model` is not one of these.
        ParallelismValueError: `bucket_bytes` is not positive; another `dtype`.
        CheckpointValueError: an adapter cannot be merged.
    """
    if bucket_bytes < 1:
        raise ParallelismValueError(f"bucket_bytes must be positive, not {bucket_bytes}.")
    _check_dtype(dtype)
    saved = _pretrained(model)

    def export() -> Export:
        check_usable(model)
        reshard(saved)
        settle(model)
        hosts = dict(adapter_hosts(saved))
        base, mesh = _base_of(saved), prepared_mesh(model)
        with Agreement().together("weight_source"):
            if hosts and not merge_adapters:
                return Export(base, base_sources(base), {}, mesh, dtype=dtype)
            return _export(base, mesh, hosts, dtype=dtype)

    export()
    return WeightSource(export, bucket_bytes)


def _check_dtype(dtype: torch.dtype | None) -> None:
    if dtype not in (None, torch.bfloat16, torch.float16, torch.float32, torch.float64):
        raise ParallelismValueError(
            f"dtype must be torch.bfloat16, float16, float32 or float64, not {dtype!r}."
        )


def _adapters(saved: Any, dtype: torch.dtype | None) -> Callable[[Path], None]:
    """Gather the adapters to rank 0, and return the function that writes them as peft does."""
    state = as_peft_names(saved, full_model_state(saved, select="adapters", dtype=dtype))

    def write(directory: Path) -> None:
        with ExitStack() as stack:
            if isinstance(prompts := getattr(saved, "prompt_encoder", None), nn.Module):
                # peft runs these to compute the tensors to write, so they need their values on every rank.
                stack.enter_context(summon_full_params(prompts, writeback=False))
            with Agreement().together("export_pretrained"):
                if world_and_rank()[1] == 0:
                    with original_classes(saved.modules()), written(directory.parent):
                        saved.save_pretrained(directory, state_dict=state)

    return write


def _model(
    saved: Any,
    mesh: Mesh | None,
    hosts: Mapping[str, Any],
    max_shard_size: int | str,
    dtype: torch.dtype | None,
) -> Callable[[Path], None]:
    """The function that writes a model directory, with the adapters of `hosts` merged."""
    base = _base_of(saved)
    with Agreement().together("export_pretrained"):
        export = _export(base, mesh, hosts, max_shard_size, dtype)

    def write(directory: Path) -> None:
        with Agreement().together("export_pretrained"):
            if world_and_rank()[1] == 0:
                write_settings(base, directory, export.untying, dtype)
        export.write(directory)

    return write


def _export(
    base: Any,
    mesh: Mesh | None,
    hosts: Mapping[str, Any],
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
) -> Export:
    """What there is to export: the model, with the adapters of `hosts` merged."""
    check_mergeable(hosts)
    tensors, layers = merged_sources(base) if hosts else (live_state(base), {})
    return Export(base, tensors, layers, mesh, max_shard_size, dtype)


def _base_of(saved: Any) -> Any:
    return saved.get_base_model() if is_a(saved, "PeftModel") else saved


def _pretrained(model: nn.Module) -> nn.Module:
    """The transformers or peft model."""
    from composer_dist.models.huggingface import HuggingFaceModel

    inner = model.model if isinstance(model, HuggingFaceModel) else model
    if is_a(inner, "PreTrainedModel", "PeftModel"):
        return inner
    raise ParallelismTypeError(
        f"An export needs a HuggingFaceModel, a transformers or a peft model, not {type(inner).__name__}; "
        "pass the part of your model that is one."
    )
