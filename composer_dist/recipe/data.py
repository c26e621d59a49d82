"""The data of a run: what to train on, and what to evaluate on."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, Subset

from composer_dist.config.mesh import MeshConfig
from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.recipe.named import resolve
from composer_dist.recipe.read import Configuration
from composer_dist.recipe.schema import (
    ChatData,
    FunctionData,
    LabeledData,
    PreferenceData,
    RowData,
    Run,
    TableData,
    TextData,
)
from composer_dist.recipe.sources import rows, text
from composer_dist.trainer import (
    DistributedDataLoader,
    PadPreferences,
    PadRows,
    StreamingDataLoader,
    Time,
    TimeUnit,
)

# Not public: for recipes and the Trainer.
from composer_dist.trainer.data.loader import length_of, sample_count

Datasets = tuple[Any, ...]
Loader = DistributedDataLoader | StreamingDataLoader


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
        case ChatData():
            return rows.conversations(run.data, tokenizer, folder)
        case PreferenceData():
            return rows.preferences(run.data, tokenizer, folder)
        case TableData():
            return rows.table(run.data, tokenizer, run.model)
        case FunctionData():
            return _of_function(run.data, folder)


def loader(dataset: Dataset[Any], configuration: Configuration, tokenizer: Any, *, training: bool) -> Loader:
    """Batches of `batch_size` samples across all ranks; the Trainer gives each rank its part.

    With context parallelism, rows are padded to a length that can be divided.

    Raises:
        ParallelismValueError: there are too few samples for one batch, or context parallelism cannot split
            them.
    """
    run, parts = configuration.run, _parts(configuration)
    data, samples = run.data, sample_count(dataset)
    if training and data.drop_last and samples is not None and samples < data.batch_size:
        packed = (
            " (rows are packed into samples of data.context tokens)"
            if isinstance(data, ChatData) and data.packing
            else ""
        )
        raise ParallelismValueError(
            f"The data has {samples} sample{'' if samples == 1 else 's'} to train on{packed}, fewer than one "
            f"batch of {data.batch_size}. Reduce data.batch_size, or set drop_last: false."
        )
    collate: Any = None
    if isinstance(data, FunctionData) and data.collate is not None:
        collate = resolve(data.collate, configuration.folder)
    elif isinstance(data, PreferenceData):
        collate = PadPreferences(rows.pad_token(tokenizer))
    elif isinstance(data, RowData) or (tokenizer is not None and _tokenized(dataset)):
        collate = PadRows(rows.pad_token(tokenizer), multiple_of=parts)
    options: dict[str, Any] = {
        "global_batch_size": data.batch_size,
        "drop_last": training and data.drop_last,
        "num_workers": data.workers,
        "collate_fn": collate,
        "pin_memory": torch.accelerator.is_available(),
    }
    if isinstance(data, RowData) and samples is None:
        return StreamingDataLoader(dataset, **options)
    shuffle = training and data.shuffle and samples is not None  # a stream shuffles itself
    return DistributedDataLoader(dataset, shuffle=shuffle, seed=run.seed, **options)


def epoch_of(run: Run, loader: Any) -> int | None:
    """The batches of an epoch; None for a stream."""
    return length_of(loader, run.trainer.get("train_subset_num_batches"))


def batches(duration: Time | str | int | None, epoch: int | None) -> int:
    """How many batches a duration has, with so many batches in an epoch; None for a stream.

    Raises:
        ParallelismValueError: its unit does not say.
    """
    time = Time.of(duration) if duration is not None else None
    if time is not None and time.unit is TimeUnit.BATCH:
        return int(time.value)
    if time is not None and time.unit is TimeUnit.EPOCH and epoch is not None:
        return int(time.value) * epoch
    raise ParallelismValueError(
        "The schedule of the learning rate needs the number of batches, which "
        f"max_duration={duration!r} does not give. Use batches ('200ba') or epochs ('3ep')."
    )


def _parts(configuration: Configuration) -> int:
    """Into how many pieces context parallelism cuts a sequence at most: two for each of its ranks, or one."""
    run, mesh = configuration.run, getattr(configuration.parallelism, "mesh", None)
    ranks = mesh.cp if isinstance(mesh, MeshConfig) else 1
    if ranks < 2:
        return 1
    data, splits = run.data, f"parallelism.mesh.cp={ranks} divides each sequence among ranks"
    if isinstance(data, PreferenceData):
        raise ParallelismValueError(f"{splits}, but data of kind preferences cannot be divided; set it to 1.")
    if isinstance(data, ChatData) and data.packing:
        raise ParallelismValueError(f"{splits}, but packed rows cannot be divided; set data.packing: false.")
    parts = ranks if run.model.kind == "masked_lm" else 2 * ranks
    if isinstance(data, TextData) and data.context % parts:
        raise ParallelismValueError(f"{splits}, so data.context must be a multiple of {parts}.")
    return 2 * ranks


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
    return make(tokens, train), make(tokens, held) if held else None


def _of_classes(data: LabeledData, tokenizer: Any) -> Datasets:
    """As many samples of each class as the smallest class has, spread evenly over its text."""
    found = [text.pieces(text.read(source), tokenizer, data.context) for source in data.classes.values()]
    count = min(map(len, found))
    chosen = [tokens[torch.arange(count) * len(tokens) // count] for tokens in found]
    tokens = torch.stack(chosen, dim=1).flatten(0, 1)  # one of each class in turn
    labels = torch.arange(len(found)).repeat(count)
    whole = text.TokenSamples(tokens, labels=labels)
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
    if len(pair) != 2 or not (hasattr(pair[0], "__getitem__") or isinstance(pair[0], Iterable)):
        raise ParallelismTypeError(
            f"{data.name} must return a data set, or a tuple of two (to train on, to evaluate on), not "
            f"{type(found).__name__}."
        )
    train, held_out = (_with_tensors(one, data) for one in pair)
    return train, held_out


def _tokenized(dataset: Any) -> bool:
    """Whether it is a data set of `datasets` whose rows have tokens."""
    return hasattr(dataset, "with_format") and "input_ids" in (dataset.column_names or next(iter(dataset)))


def _with_tensors(dataset: Any, data: FunctionData) -> Any:
    """A data set of `datasets` with tensors, which batches need, in place of Python's lists."""
    ours = type(dataset).__module__.partition(".")[0] == "datasets" and data.collate is None
    if not ours or getattr(dataset, "format", {}).get("type") or getattr(dataset, "_formatting", None):
        return dataset
    return dataset.with_format("torch")
