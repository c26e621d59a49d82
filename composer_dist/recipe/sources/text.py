"""Text to train on, cut into samples.

Samples and masks depend only on the text and the seed: they are the same on any number of ranks and after
any resume.
"""

import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from composer_dist.errors import ParallelismValueError
from composer_dist.random_states import derived_seed
from composer_dist.recipe.other_libraries.failures import blaming
from composer_dist.recipe.sources.files import files_of
from composer_dist.users_code import warn

IGNORED = -100
"""The label that losses skip, as everywhere in transformers."""
Sample = dict[str, Tensor]
_AT_ONCE = 1000
"""Paragraphs that are tokenized together."""


def read(source: str | Sequence[str] | Mapping[str, Any]) -> str:
    """The text that a configuration names.

    Args:
        source: "english" (the manual of the Python language) or "python" (the standard library's top-level
            modules); a glob of files, or several; or the arguments of `datasets.load_dataset`, with
            `dataset` for its path and `column` for the text.

    Raises:
        ParallelismValueError: the text does not exist, or a file is not a text.
    """
    if isinstance(source, Mapping):
        return _of_dataset(**source)
    if source == "english":
        from pydoc_data.topics import topics

        return "\n\n".join(topics[name] for name in sorted(topics))
    if source == "python":
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    else:
        files = files_of(source)
        if source and not files:
            raise ParallelismValueError(f"data.source: {source!r} matches only folders; name files in them.")
        if files and _OF_ROWS.issuperset(file.suffix.lower() for file in files):
            warn(
                f"data.source: {files[0]} has rows, but a text is trained on as the file has it, with braces "
                "and quotes. For a column of rows give {dataset: json, data_files: ..., column: text}."
            )
    return "\n\n".join(map(_decoded, files))


_OF_ROWS = frozenset((".jsonl", ".json", ".csv", ".tsv"))


def _decoded(file: Path) -> str:
    """The text of a file in UTF-8, with a newline at the end of each line on any system."""
    written = file.read_bytes()
    if b"\0" in written:
        raise ParallelismValueError(
            f"Not text in UTF-8, because of zero bytes (as in UTF-16 and binary files): {file}."
        )
    try:
        text = written.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = written.count(b"\n", 0, error.start) + 1
        raise ParallelismValueError(
            f"{file}:{line}: not text in UTF-8, because of {written[error.start : error.end]!r}. Convert the "
            "file, for example by iconv -f latin1 -t utf-8."
        ) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _of_dataset(dataset: str = "", column: str = "text", split: str = "train", **arguments: Any) -> str:
    loaded = load(dataset, split=split, **arguments)
    if column not in loaded.column_names:
        raise ParallelismValueError(
            f"{dataset} has no column {column!r}; it has {', '.join(loaded.column_names)}."
        )
    texts = list(loaded[column])
    for number, one in enumerate(texts):
        if not isinstance(one, str):
            raise ParallelismValueError(
                f"Row {number} of {dataset} has {one!r} in column {column!r}, not a text. Remove the row, or "
                "name another column."
            )
    return "\n\n".join(texts)


def load(dataset: str, **arguments: Any) -> Any:
    """A data set, by `datasets.load_dataset`.

    Raises:
        ParallelismValueError: it has no name, or cannot be loaded.
    """
    if not dataset:
        raise ParallelismValueError("A source given as a mapping needs 'dataset', for datasets.load_dataset.")
    with blaming(f"The data set {dataset!r} cannot be loaded"):
        try:
            return library().load_dataset(dataset, **arguments)
        except library().exceptions.DatasetGenerationError as error:
            cause = error.__cause__ or error  # it says what is wrong
            if (details := getattr(cause, "details", None)) is None:
                raise cause from None
            raise ParallelismValueError(
                f"The data set {dataset!r} has a file with other columns than the first one: {details()}"
            ) from error


def library() -> Any:
    """The module `datasets`, with progress bars on a terminal only.

    Raises:
        ParallelismValueError: it is not installed.
    """
    try:
        import datasets
    except ImportError:
        raise ParallelismValueError(
            "Reading data sets needs datasets: pip install 'composer_dist[data]'."
        ) from None
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    return datasets


def pieces(text: str, tokenizer: Any, length: int) -> Tensor:
    """The text's tokens, int32 of `(samples, length)`, without the incomplete sample at the end.

    Raises:
        ParallelismValueError: the text is shorter than one sample.
    """
    if not text:
        raise ParallelismValueError("The text is empty: data.source, or data.classes, names nothing to read.")
    tokens = _encode(text, tokenizer)
    count = len(tokens) // length
    if not count:
        raise ParallelismValueError(f"The text has {len(tokens)} tokens, fewer than one sample of {length}.")
    return tokens[: count * length].view(count, length)


def _encode(text: str, tokenizer: Any) -> Tensor:
    if tokenizer.init_kwargs.get("is_bytes"):  # the tokens are the bytes themselves
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).int()
    paragraphs = [f"{paragraph}\n\n" for paragraph in text.split("\n\n") if paragraph]
    parts: list[Tensor] = [torch.empty(0, dtype=torch.int32)]
    for first in range(0, len(paragraphs), _AT_ONCE):  # all at once take 180 bytes a token
        encoded = tokenizer(
            paragraphs[first : first + _AT_ONCE], add_special_tokens=False, return_attention_mask=False
        )
        tokens = [token for tokens in encoded["input_ids"] for token in tokens]
        parts.append(torch.tensor(tokens, dtype=torch.int32))
    return torch.cat(parts)


def hold_out(samples: Sequence[Any], count: int) -> tuple[list[int], list[int]]:
    """The indices to train on, and `count` evenly spread ones to evaluate on.

    Raises:
        ParallelismValueError: nothing would be left to train on.
    """
    if count >= len(samples):
        raise ParallelismValueError(
            f"There are {len(samples)} samples; {count} cannot be held out. Lower data.held_out."
        )
    every = len(samples) // count if count else len(samples) + 1
    held = list(range(0, len(samples), every))[:count]
    taken = set(held)
    return [index for index in range(len(samples)) if index not in taken], held


class TokenSamples(Dataset[Sample]):
    """Some samples of a text with labels: the tokens, for causal language models, or those of classes.

    Args:
        tokens: `(samples, length)`, of any integer type.
        rows: which of the samples; None takes all.
        labels: of each sample.
    """

    def __init__(
        self, tokens: Tensor, rows: Sequence[int] | None = None, labels: Tensor | None = None
    ) -> None:
        self._tokens = tokens
        self._rows = range(len(tokens)) if rows is None else rows
        self._labels = tokens if labels is None else labels

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        row = self._rows[index]
        return {"input_ids": self._tokens[row].long(), "labels": self._labels[row].long()}


@dataclass(eq=False)
class MaskedSamples(Dataset[Sample]):
    """Samples for masked language models, with new masks in each epoch as in RoBERTa (arXiv:1907.11692).

    Of the chosen tokens 80% become the mask, 10% another token, and 10% stay (BERT, arXiv:1810.04805).
    """

    tokens: Tensor
    """`(samples, length)`, of any integer type."""
    rows: Sequence[int]
    """Which of the samples."""
    mask: int
    """The mask's token."""
    vocabulary: int
    """How many tokens there are."""
    share: float
    """The share of the tokens that are chosen."""
    seed: int
    """Determines the choice, together with the epoch and the sample's index."""
    epoch: int = 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses other tokens."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        tokens = self.tokens[self.rows[index]].long()
        # One generator per sample: the rank that reads it and earlier reads make no difference.
        generator = torch.Generator().manual_seed(derived_seed(self.seed, self.epoch, index))
        chosen = torch.rand(len(tokens), generator=generator) < self.share
        chosen[int(torch.randint(len(tokens), (), generator=generator))] = True  # at least one
        fate = torch.rand(len(tokens), generator=generator)
        others = torch.randint(self.vocabulary, (len(tokens),), generator=generator)
        masked = torch.where(chosen & (fate < 0.8), self.mask, tokens)
        masked = torch.where(chosen & (fate >= 0.9), others, masked)
        return {"input_ids": masked, "labels": torch.where(chosen, tokens, IGNORED)}
