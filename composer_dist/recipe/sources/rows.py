"""Rows of tables, from files or by `datasets`, as tokens with labels."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from composer_dist.distributed import process_group
from composer_dist.errors import ParallelismValueError
from composer_dist.recipe.other_libraries.failures import blaming
from composer_dist.recipe.schema import ChatData, PreferenceData, RowData, Source, TableData
from composer_dist.recipe.sources.text import files_of, hold_out, library, load
from composer_dist.trainer import (
    ChatTokenizer,
    PackedDataset,
    PackedStream,
    PreferenceTokenizer,
    TableTokenizer,
)

_FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}


def read(source: Source, streaming: bool = False) -> Any:
    """The rows that a configuration names.

    Args:
        source: see `RowData.source`.
        streaming: as an iterable data set, which reads while it is read.

    Raises:
        ParallelismValueError: they do not exist, or are in no known format.
    """
    if isinstance(source, Mapping):
        return load(**{"dataset": "", "split": "train", "streaming": streaming, **source})
    patterns = [source] if isinstance(source, str) else source
    if len(patterns) == 1 and Path(patterns[0]).is_dir():
        rows = library().load_from_disk(patterns[0])
        return rows.to_iterable_dataset(len(rows.cache_files)) if streaming else rows
    files = files_of(patterns)
    kinds = {_FORMATS.get(file.suffix) for file in files}
    if len(kinds) > 1 or None in kinds:
        found = ", ".join(sorted({file.suffix for file in files}))
        raise ParallelismValueError(
            f"data.source: {found} cannot be read together; rows "
            f"are in files of one kind, {', '.join(_FORMATS)}, or in a folder that save_to_disk wrote."
        )
    return load(
        str(kinds.pop()), data_files=[str(file) for file in files], split="train", streaming=streaming
    )


def pair(data: RowData) -> tuple[Any, Any]:
    """The rows to train on, and those to evaluate on or None.

    Raises:
        ParallelismValueError: they cannot be read, or too many are held out.
    """
    rows = read(data.source, data.streaming)
    if data.held_out:
        train, held = hold_out(range(len(rows)), data.held_out)
        return rows.select(train), rows.select(held)
    return rows, None if data.evaluate is None else read(data.evaluate)


def conversations(data: ChatData, tokenizer: Any, folder: Path) -> tuple[Any, ...]:
    """Conversations as tokens with labels, packed if the configuration says so."""
    _set_template(data, tokenizer, folder)
    make = ChatTokenizer(tokenizer, max_length=data.context, loss_on=data.loss_on)
    return tokenized(data, make, tokenizer, data.packing)


def preferences(data: PreferenceData, tokenizer: Any, folder: Path) -> tuple[Any, ...]:
    """Prompts with a chosen and a rejected answer as tokens with labels."""
    _set_template(data, tokenizer, folder)
    return tokenized(data, PreferenceTokenizer(tokenizer, max_length=data.context), tokenizer)


def table(data: TableData, tokenizer: Any, classes: bool) -> tuple[Any, ...]:
    """Texts as tokens, with classes, or with the tokens of texts to write."""
    names = classes_of(data) if classes else None
    make = TableTokenizer(tokenizer, text=data.text, label=data.label, classes=names, max_length=data.context)
    return tokenized(data, make, tokenizer)


def classes_of(data: Any) -> list[str] | None:
    """The names of the classes in the data of a run; None if it does not say.

    Raises:
        ParallelismValueError: the table has no such column, or is streamed and names no classes.
    """
    if not isinstance(data, TableData) or data.classes is not None:
        return None if getattr(data, "classes", None) is None else list(data.classes)
    rows = read(data.source, data.streaming)
    features = rows.features or {}
    if (names := getattr(features.get(data.label), "names", None)) is not None:
        return list(names)
    if data.streaming:
        raise ParallelismValueError("data.streaming does not read all labels before: give data.classes.")
    if data.label not in features:
        raise ParallelismValueError(f"The table has no column {data.label!r}; it has {', '.join(features)}.")
    found = rows.unique(data.label)
    if all(isinstance(one, int) for one in found):
        return [str(number) for number in range(max(found) + 1)]
    if not all(isinstance(one, str) for one in found):
        raise ParallelismValueError(f"data.label: the column {data.label!r} has neither names nor numbers.")
    return sorted(found)


def tokenized(data: RowData, make: Any, tokenizer: Any, packing: bool = False) -> tuple[Any, ...]:
    """What a `RowTokenizer` makes of the rows to train on and to evaluate on.

    The first rank of each host tokenizes; the others find the result in the cache of `datasets`.
    """
    rows = pair(data)
    found: tuple[Any, ...] = ()
    for first in (True, False):
        with process_group.together("tokenizing the data"):
            if first == (process_group.local_rank() == 0):
                found = tuple(None if one is None else make.map(one) for one in rows)
    if not packing:
        return found
    return tuple(None if one is None else _packed(one, data.context, pad_token(tokenizer)) for one in found)


def pad_token(tokenizer: Any) -> int:
    """The token to pad with; models do not see it."""
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0


def _set_template(data: ChatData | PreferenceData, tokenizer: Any, folder: Path) -> None:
    """Gives the tokenizer, which is saved with the model, the chat template of the configuration."""
    if data.chat_template is not None:
        with blaming("data.chat_template"):
            tokenizer.chat_template = (folder / data.chat_template).read_text()


def _packed(rows: Any, length: int, pad: int) -> Any:
    kind: Any = PackedDataset if hasattr(rows, "__len__") else PackedStream
    return kind(rows, length, how="whole", pad_token_id=pad)
