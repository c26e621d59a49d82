"""Documents of any length packed into blocks of one length, without attention between documents.

A block has `input_ids`, `labels` and `position_ids`. Positions start at 0 with each document; without an
attention mask and a cache, transformers' models use them to separate the documents of a block.
(`HuggingFaceModel` turns the cache off; a bare model needs `use_cache=False`.) The first label of each
document is -100, because its predecessor in the block is another document's; so are the labels of padding.
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from composer_dist.config.base import require
from composer_dist.errors import ParallelismTypeError, ParallelismValueError

IGNORED = -100
Piece = tuple[int, int, int]
"""A document's number, and where its tokens begin and end."""


@dataclass(eq=False, repr=False)
class _Packing:
    documents: Any
    length: int
    _: KW_ONLY
    key: str = "input_ids"
    pad_token_id: int = 0
    drop_last: bool = False

    def __post_init__(self) -> None:
        check_length(self.length)


@dataclass(eq=False, repr=False, kw_only=True)
class PackedDataset(_Packing, Dataset[dict[str, Tensor]]):
    """Blocks of tokens from documents that can be indexed; the blocks can be shuffled and resumed.

    Args:
        documents: token sequences, or mappings with one, such as the rows of a tokenized Hugging Face
            dataset. Each is read once for its length, and again when its block is.
        length: tokens of a block.
        how: "cut": documents one after the other, cut where a block is full, so that only the last
            block is padded. "whole": a document stays in one piece where a block can hold it
            (best fit, longest first); the rest of a block is padding.
        key: of the tokens in a mapping.
        pad_token_id: for what is left of a block.
        drop_last: with "cut", leave out the last block if it is not full.

    Raises:
        ParallelismValueError: there are no tokens, or an option is invalid.
    """

    how: Literal["cut", "whole"] = "cut"

    def __post_init__(self) -> None:
        super().__post_init__()
        require("how", self.how, ("cut", "whole"))
        lengths = [len(tokens) for tokens in _all_tokens(self.documents, self.key)]
        if not sum(lengths):
            raise ParallelismValueError("There are no tokens to pack: all documents are empty.")
        pieces = _cut if self.how == "cut" else _best_fit
        self.blocks: list[list[Piece]] = pieces(lengths, self.length)
        """What each block consists of."""
        if self.drop_last and self.how == "cut" and sum(lengths) % self.length:
            self.blocks.pop()

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        pieces = [
            _tokens(self.documents[number], self.key, number)[first:end]
            for number, first, end in self.blocks[index]
        ]
        return block(pieces, self.length, self.pad_token_id)


@dataclass(eq=False, repr=False)
class PackedStream(_Packing, IterableDataset[dict[str, Tensor]]):
    """Blocks of tokens from a stream of documents, cut where a block is full.

    Args:
        documents: an iterable of token sequences, or of mappings with one; starts over each time.
        length: tokens of a block.
        key: of the tokens in a mapping.
        pad_token_id: for what is left of the last block.
        drop_last: leave it out if it is not full.
    """

    def set_epoch(self, epoch: int) -> None:
        """Calls the documents' own `set_epoch`, if they have one."""
        if callable(tell := getattr(self.documents, "set_epoch", None)):
            tell(epoch)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        pieces: list[Tensor] = []
        free = self.length
        for number, document in enumerate(self.documents):
            tokens = _tokens(document, self.key, number)
            while len(tokens):
                pieces.append(tokens[:free])
                tokens = tokens[free:]
                free -= len(pieces[-1])
                if not free:
                    yield block(pieces, self.length, self.pad_token_id)
                    pieces, free = [], self.length
        if pieces and not self.drop_last:
            yield block(pieces, self.length, self.pad_token_id)


def block(pieces: Sequence[Tensor], length: int, pad_token_id: int) -> dict[str, Tensor]:
    """One block of documents, or parts of them, and of padding up to `length`."""
    rest = length - sum(len(piece) for piece in pieces)
    padding = [torch.full((rest,), pad_token_id)] if rest else []
    labels = [piece.clone() for piece in pieces]
    for piece in labels:
        piece[0] = IGNORED
    return {
        "input_ids": torch.cat([*pieces, *padding]),
        "labels": torch.cat([*labels, *(torch.full_like(one, IGNORED) for one in padding)]),
        "position_ids": torch.cat([torch.arange(len(piece)) for piece in (*pieces, *padding)]),
    }


def check_length(length: object) -> None:
    """Refuses lengths that would leave no label."""
    if not isinstance(length, int) or length < 2:
        raise ParallelismValueError(f"length must be a number of tokens, at least 2, not {length!r}.")


def _cut(lengths: Sequence[int], size: int) -> list[list[Piece]]:
    """Documents one after the other, cut at each multiple of `size`."""
    blocks: list[list[Piece]] = []
    for number, (end, length) in enumerate(zip(accumulate(lengths), lengths, strict=True)):
        start = end - length
        place = start
        while place < end:
            if place % size == 0:
                blocks.append([])
            stop = min(end, (place // size + 1) * size)
            blocks[-1].append((number, place - start, stop - start))
            place = stop
    return blocks


def _best_fit(lengths: Sequence[int], size: int) -> list[list[Piece]]:
    """Each piece, the longest first, into the fullest block that has room for it.

    Best-fit decreasing; see Ding et al. 2024, "Fewer Truncations Improve Language Modeling".
    """
    pieces = [
        (number, first, min(first + size, length))
        for number, length in enumerate(lengths)
        for first in range(0, length, size)
    ]
    blocks: list[list[Piece]] = []
    room: list[tuple[int, int]] = []  # free tokens and number of each block that is not full, in order
    for piece in sorted(pieces, key=lambda piece: piece[1] - piece[2]):
        need = piece[2] - piece[1]
        fit = bisect_left(room, (need, -1))
        if fit == len(room):
            free, index = size, len(blocks)
            blocks.append([])
        else:
            free, index = room.pop(fit)
        blocks[index].append(piece)
        if free > need:
            insort(room, (free - need, index))
    return blocks


def _all_tokens(documents: Any, key: str) -> Iterator[Any]:
    """The token sequences of all documents; of a Hugging Face dataset by its column, as Python lists."""
    if hasattr(documents, "with_format") and hasattr(documents, "column_names"):
        _check_key(key, "The dataset has no column", documents.column_names)
        yield from documents.with_format(None)[key]
        return
    for number in range(len(documents)):
        yield _tokens(documents[number], key, number)


def _check_key(key: str, lacks: str, there: Collection[Any]) -> None:
    if key not in there:
        known = ", ".join(map(str, there))
        raise ParallelismValueError(f"{lacks} {key!r}; it has {known}. Tokenize it first.")


def _tokens(document: Any, key: str, number: int) -> Tensor:
    if isinstance(document, Mapping):
        _check_key(key, f"Document {number} has no", document)
        document = document[key]
    try:
        tokens = torch.as_tensor(document)
    except (TypeError, ValueError, RuntimeError):
        tokens = None
    if tokens is None or tokens.ndim != 1 or (len(tokens) and tokens.is_floating_point()):
        raise ParallelismTypeError(
            f"Document {number} is not a sequence of tokens but a {type(document).__name__}; tokenize it."
        )
    return tokens.long()
