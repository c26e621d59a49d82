"""The data of a run: what to train on, what to evaluate on, and each rank's part of it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

from composer_dist.distributed.config import ParallelismConfig
from composer_dist.distributed.mesh import mesh_sizes
from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.run import text
from composer_dist.run.reference import resolve
from composer_dist.run.schema import FunctionData, LabelledData, Run, TextData

Datasets = tuple[Dataset[Any], Dataset[Any] | None]


def datasets(run: Run, tokenizer: Any, folder: Path) -> Datasets:
    """What to train on, and what to evaluate on.

    Args:
        run: the configuration.
        tokenizer: for texts.
        folder: the configuration's, for files that it names.

    Raises:
        ParallelismError: the data is not there, or not enough.
    """
    match run.data:
        case TextData():
            return _of_text(run, run.data, tokenizer)
        case LabelledData():
            return _of_classes(run.data, tokenizer)
        case FunctionData():
            return _of_function(run.data, folder)


def data_part(config: ParallelismConfig | None, world: int, rank: int) -> dict[str, int]:
    """`num_replicas` and `rank` of a rank's part of the data, before there is a mesh.

    The same as `sampler_kwargs` of the mesh that preparation will make.
    """
    if config is None:
        return {"num_replicas": 1, "rank": 0}
    sizes = mesh_sizes(config, world)
    inner = sizes["cp"] * sizes["tp"]  # ranks that see the same samples
    return {"num_replicas": world // inner, "rank": rank // inner}


def loader(dataset: Dataset[Any], run: Run, part: Mapping[str, int], *, training: bool) -> DataLoader[Any]:
    """This rank's batches, a part of the run's `batch_size` each.

    Raises:
        ParallelismValueError: the batch, or the data, cannot be divided among the ranks.
    """
    replicas, data = part["num_replicas"], run.data
    if data.batch_size % replicas:
        raise ParallelismValueError(
            f"data.batch_size is {data.batch_size}, which {replicas} ranks cannot share evenly; make it a "
            f"multiple of {replicas}."
        )
    if training and len(dataset) < data.batch_size:  # type: ignore[arg-type]
        raise ParallelismValueError(
            f"There are {len(dataset)} samples to train on, fewer than one batch of {data.batch_size}."  # type: ignore[arg-type]
        )
    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset, shuffle=training and data.shuffle, seed=run.seed, drop_last=training, **part
    )
    return DataLoader(
        dataset,
        batch_size=data.batch_size // replicas,
        sampler=sampler,
        drop_last=training,
        num_workers=data.workers,
        persistent_workers=data.workers > 0,
        pin_memory=torch.accelerator.is_available(),
    )


def _of_text(run: Run, data: TextData, tokenizer: Any) -> Datasets:
    tokens = text.pieces(text.read(data.source), tokenizer, data.context)
    train, held = text.hold_out(range(len(tokens)), data.held_out)
    make = text.TokenSamples
    if run.model.kind == "masked_lm":
        if tokenizer.mask_token_id is None:
            raise ParallelismValueError("A masked language model needs a tokenizer with a mask token.")
        make = partial(  # type: ignore[assignment]
            text.MaskedSamples,
            mask=tokenizer.mask_token_id,
            vocabulary=len(tokenizer),
            share=data.mask,
            seed=run.seed,
        )
    return make(tokens[train]), make(tokens[held]) if held else None


def _of_classes(data: LabelledData, tokenizer: Any) -> Datasets:
    """As many samples of each class as the smallest has, spread evenly over its text."""
    found = [text.pieces(text.read(source), tokenizer, data.context) for source in data.classes.values()]
    count = min(map(len, found))
    chosen = [tokens[torch.arange(count) * len(tokens) // count] for tokens in found]
    tokens = torch.stack(chosen, dim=1).flatten(0, 1)  # one of each class in turn
    labels = torch.arange(len(found)).repeat(count)
    whole = text.LabelledSamples(tokens, labels)
    # Rows of one sample of each class, so that what is held out is as balanced as what is trained on.
    rows, held_rows = text.hold_out(range(count), data.held_out // len(found))
    train, held = (
        [row * len(found) + label for row in some for label in range(len(found))]
        for some in (rows, held_rows)
    )
    return Subset(whole, train), Subset(whole, held) if held else None


def _of_function(data: FunctionData, folder: Path) -> Datasets:
    found = resolve(data.name, folder)(**data.arguments)
    pair = found if isinstance(found, tuple) else (found, None)
    if len(pair) != 2 or not hasattr(pair[0], "__getitem__"):
        raise ParallelismTypeError(
            f"{data.name} must return a data set, or a tuple of two (to train on, to evaluate on), not "
            f"{type(found).__name__}."
        )
    return pair
