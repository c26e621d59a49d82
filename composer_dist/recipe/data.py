"""The data of a run: what to train on, and what to evaluate on."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, Subset

from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.recipe import text
from composer_dist.recipe.named import resolve
from composer_dist.recipe.schema import FunctionData, LabeledData, Run, TextData
from composer_dist.trainer import DistributedDataLoader

Datasets = tuple[Dataset[Any], Dataset[Any] | None]


def datasets(run: Run, tokenizer: Any, folder: Path) -> Datasets:
    """What to train on, and what to evaluate on.

    Args:
        run: the configuration.
        tokenizer: for texts.
        folder: the configuration's, for files that it names.

    Raises:
        ParallelismError: the data does not exist, or there is too little of it.
    """
    match run.data:
        case TextData():
            return _of_text(run, run.data, tokenizer)
        case LabeledData():
            return _of_classes(run.data, tokenizer)
        case FunctionData():
            return _of_function(run.data, folder)


def loader(dataset: Dataset[Any], run: Run, *, training: bool) -> DistributedDataLoader:
    """Batches of `batch_size` samples across all ranks; the Trainer gives each rank its part.

    Raises:
        ParallelismValueError: there are too few samples for one batch.
    """
    data, samples = run.data, len(dataset)  # type: ignore[arg-type]
    if training and samples < data.batch_size:
        raise ParallelismValueError(
            f"There are only {samples} samples to train on, fewer than one batch of {data.batch_size}."
        )
    return DistributedDataLoader(
        dataset,
        global_batch_size=data.batch_size,
        shuffle=training and data.shuffle,
        seed=run.seed,
        drop_last=training,
        num_workers=data.workers,
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


def _of_classes(data: LabeledData, tokenizer: Any) -> Datasets:
    """As many samples of each class as the smallest class has, spread evenly over its text."""
    found = [text.pieces(text.read(source), tokenizer, data.context) for source in data.classes.values()]
    count = min(map(len, found))
    chosen = [tokens[torch.arange(count) * len(tokens) // count] for tokens in found]
    tokens = torch.stack(chosen, dim=1).flatten(0, 1)  # one of each class in turn
    labels = torch.arange(len(found)).repeat(count)
    whole = text.TokenSamples(tokens, labels)
    # A row has one sample of each class, so that the held-out samples are balanced too.
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
