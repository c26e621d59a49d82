"""Rows of tables, from files or by `datasets`, as tokens with labels."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from composer_dist.distributed import process_group
from composer_dist.errors import ParallelismError, ParallelismValueError
from composer_dist.recipe.schema import (
    ChatData,
    HubModel,
    ModuleModel,
    PreferenceData,
    RowData,
    Source,
    TableData,
)
from composer_dist.recipe.sources.files import chat_template, files_of
from composer_dist.recipe.sources.text import hold_out, library, load
from composer_dist.trainer import (
    ChatTokenizer,
    PackedDataset,
    PackedStream,
    PreferenceTokenizer,
    TableTokenizer,
)
from composer_dist.wording import listed, near_miss

_FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}


def read(source: Source, streaming: bool = False, key: str = "data.source") -> Any:
    """The rows that a configuration names.

    Args:
        source: see `RowData.source`.
        streaming: as an iterable data set, which reads while it is read.
        key: where the configuration names them.

    Raises:
        ParallelismValueError: they do not exist, or are in no known format.
    """
    if isinstance(source, Mapping):
        return load(**{"dataset": "", "split": "train", "streaming": streaming, **source})
    patterns = [source] if isinstance(source, str) else source
    if len(patterns) == 1 and Path(patterns[0]).is_dir():
        try:
            rows = library().load_from_disk(patterns[0])
        except FileNotFoundError:
            raise ParallelismValueError(
                f"{key}: {patterns[0]} is not a folder that save_to_disk wrote. For files in it give their "
                f"names, such as {Path(patterns[0]) / '*.jsonl'}."
            ) from None
        if isinstance(rows, dict):
            raise ParallelismValueError(
                f"{key}: {patterns[0]} has the splits {', '.join(rows)}: give the folder of one, such "
                f"as {Path(patterns[0]) / next(iter(rows))}."
            )
        return rows.to_iterable_dataset(len(rows.cache_files)) if streaming else rows
    files = [file for file in files_of(patterns) if file.stat().st_size]
    if not files:
        raise ParallelismValueError(f"{key}: the files of {listed(patterns)} are empty.")
    kinds = {file.suffix.lower(): _FORMATS.get(file.suffix.lower()) for file in files}
    if len({*kinds.values()}) > 1 or None in kinds.values():
        unknown = [f"{suffix!r}" for suffix, kind in kinds.items() if kind is None]
        fault = f"unknown kinds of files, {', '.join(unknown)}" if unknown else "several kinds of files"
        raise ParallelismValueError(
            f"{key}: {listed(patterns)} names {fault}. Rows are in files of one kind "
            f"({', '.join(_FORMATS)}), or in a folder that save_to_disk wrote."
        )
    kind = str({*kinds.values()}.pop())
    # The texts "NA" and "None" are texts; an empty cell is empty.
    options: Any = {"keep_default_na": False, "na_values": [""]} if kind == "csv" else {}
    with _naming_lines(files, key):
        return load(kind, data_files=list(map(str, files)), split="train", streaming=streaming, **options)


@contextmanager
def _naming_lines(files: Sequence[Path], key: str) -> Iterator[None]:
    """Errors name the files, and the line in files of JSON lines."""
    try:
        yield
    except ParallelismValueError as failure:
        for file in files:
            with file.open("rb") as lines:
                for number, line in enumerate(lines, 1) if file.suffix.lower() == ".jsonl" else ():
                    try:
                        json.loads(line.strip() or b"{}")
                    except ValueError as error:
                        raise ParallelismValueError(f"{key}: {file}:{number}: not JSON: {error}.") from None
        raise ParallelismValueError(f"{key}: {listed(files, 5)}: {failure}") from failure


def conversations(data: ChatData, tokenizer: Any, folder: Path) -> tuple[Any, ...]:
    """Conversations as tokens with labels, packed if the configuration says so."""
    _set_template(data, tokenizer, folder)
    make = ChatTokenizer(tokenizer, max_length=data.context, loss_on=data.loss_on)
    rows = tokenized(data, make)
    if not data.packing:
        return rows
    return tuple(None if one is None else _packed(one, data.context, pad_token(tokenizer)) for one in rows)


def preferences(data: PreferenceData, tokenizer: Any, folder: Path) -> tuple[Any, ...]:
    """Prompts with a chosen and a rejected answer as tokens with labels."""
    _set_template(data, tokenizer, folder)
    return tokenized(data, PreferenceTokenizer(tokenizer, max_length=data.context))


def table(data: TableData, tokenizer: Any, model: HubModel | ModuleModel) -> tuple[Any, ...]:
    """Texts as tokens, with classes, or with the tokens of texts to write."""
    make = TableTokenizer(
        tokenizer,
        text=data.text,
        label=data.label,
        classes=classes_of(data, model),
        writes=model.kind == "seq2seq_lm",
        max_length=data.context,
    )
    return tokenized(data, make)


def classes_of(data: Any, model: HubModel | ModuleModel) -> list[str] | None:
    """The names of the classes in the data of a run; None if it has none.

    They are `data.classes`, the names that a data set of `datasets` has, the texts in the column in
    alphabetical order, or its numbers: all from 0 on if there is a 0, otherwise those that there are.

    Raises:
        ParallelismValueError: the table has no such column, its labels are not classes, it is streamed and
            names no classes, or `model.num_labels` is another number.
    """
    if model.kind != "sequence_classification":
        return None
    count, given = model.num_labels, getattr(data, "classes", None)
    names = _classes(data, count) if given is None and isinstance(data, TableData) else given and list(given)
    if names is not None and len(names) < 2:
        raise ParallelismValueError(
            f"data.label: there is only one class, {names[0]!r}. Name all classes in data.classes."
        )
    if names is not None and count not in (None, len(names)):
        where = "data.label" if given is None else "data.classes"
        raise ParallelismValueError(
            f"model.num_labels is {count}, but {where} has {len(names)} classes: {listed(names)}. "
            "Remove num_labels, or name all classes in data.classes."
        )
    return names


def _classes(data: TableData, count: int | None) -> list[str] | None:
    """The names of the classes in a column; None for the numbers that a regression learns."""
    rows = read(data.source, data.streaming)
    features = rows.features or {}
    if (names := getattr(features.get(data.label), "names", None)) is not None:
        return list(names)
    if count == 1:
        if getattr(features.get(data.label), "dtype", "").endswith("string"):
            raise ParallelismValueError(
                f"model.num_labels: 1 trains a regression on numbers, but column {data.label!r} has texts."
            )
        return None
    if data.streaming:
        raise ParallelismValueError("data.streaming reads no labels before training: give data.classes.")
    if data.label not in features:
        near = near_miss(data.label, list(features))
        raise ParallelismValueError(
            f"data.label: the table has no column {data.label!r}.{near} Its columns: {', '.join(features)}."
        )
    labels = [one for one in rows.unique(data.label) if one is not None and one == one]
    if labels and all(isinstance(one, bool) for one in labels):
        return ["false", "true"]
    if labels and all(isinstance(one, str) for one in labels):
        return sorted(labels)
    whole = (isinstance(one, int) or (isinstance(one, float) and one.is_integer()) for one in labels)
    if not labels or not all(whole):
        raise ParallelismValueError(
            f"data.label: classes are texts or whole numbers, but column {data.label!r} has "
            f"{listed(labels) or 'no values'}. model.num_labels: 1 trains a regression on numbers."
        )
    numbers = sorted(map(int, labels))
    if count is not None and numbers[0] >= 0 and numbers[-1] < count:
        return [str(number) for number in range(count)]
    if numbers[0] == 0 and numbers[-1] < len(rows):
        return [str(number) for number in range(numbers[-1] + 1)]
    return [str(number) for number in numbers]


def tokenized(data: RowData, make: Any) -> tuple[Any, Any]:
    """What a tokenizer makes of the rows to train on, and of those to evaluate on or None.

    The first rank of each host tokenizes; the others find the result in the cache of `datasets`.

    Raises:
        ParallelismValueError: rows cannot be read or tokenized, or too many are held out.
    """
    sources = {"data.source": data.source, "data.evaluate": data.evaluate}
    found = {
        key: read(one, data.streaming and key == "data.source", key)
        for key, one in sources.items()
        if one is not None
    }
    made: dict[str, Any] = {}
    for first in (True, False):
        with process_group.together("tokenizing the data"):
            if first == (process_group.local_rank() == 0):
                made = {key: _map(make, rows, key) for key, rows in found.items()}
    train = made["data.source"]
    if not data.held_out:
        return train, made.get("data.evaluate")
    kept, held = hold_out(range(len(train)), data.held_out)
    return train.select(kept), train.select(held)


def _map(make: Any, rows: Any, key: str) -> Any:
    """What a tokenizer makes of rows; its errors begin with the key that names the rows."""
    try:
        return make.map(rows)
    except ParallelismError as error:
        raise type(error)(f"{key}: {error}") from error
    except UnicodeDecodeError as error:  # files of JSON are decoded when their values are read
        raise ParallelismValueError(
            f"{key}: the rows are not text in UTF-8 ({error}). Convert the files, for example by "
            "iconv -f latin1 -t utf-8."
        ) from error


def pad_token(tokenizer: Any) -> int:
    """The token to pad with; models do not see it."""
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0


def _set_template(data: ChatData | PreferenceData, tokenizer: Any, folder: Path) -> None:
    """Gives the tokenizer, which is saved with the model, the chat template of the configuration."""
    if (text := chat_template(data, folder)) is not None:
        tokenizer.chat_template = text


def _packed(rows: Any, length: int, pad: int) -> Any:
    kind: Any = PackedDataset if hasattr(rows, "__len__") else PackedStream
    return kind(rows, length, how="whole", pad_token_id=pad)
