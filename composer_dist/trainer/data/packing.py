"""Documents of any length packed into blocks of one length, without attention between documents.

A block has `input_ids`, `labels` and `position_ids`. Positions start at 0 with each document; without an
attention mask and a cache, transformers' models use them to separate the documents of a block.
(`HuggingFaceModel` turns the cache off; a bare model needs `use_cache=False`.) The labels are those of the
documents, or their tokens. The first label of each document is -100, because its predecessor in the block is
another document's; so are the labels of padding.
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import accumulate, count, islice
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from composer_dist.config.base import require
from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.trainer.data.streaming import rewind, split, with_position

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
    how: Literal["cut", "whole"] = "cut"

    def __post_init__(self) -> None:
        check_length(self.length)
        require("how", self.how, ("cut", "whole"))

    @property
    def packing(self) -> dict[str, Any]:
        """What the blocks depend on, besides the documents: positions in other blocks mean nothing."""
        windows = {"window": self.window} if self.how == "whole" and hasattr(self, "window") else {}
        return {"length": self.length, "how": self.how, **windows}


@dataclass(eq=False, repr=False, kw_only=True)
class PackedDataset(_Packing, Dataset[dict[str, Tensor]]):
    """Blocks of tokens from documents that can be indexed; the blocks can be shuffled and resumed.

    Args:
        documents: token sequences, or mappings with one and perhaps `labels`, such as the rows of a
            tokenized Hugging Face dataset. Each is read once for its length, and again when its block is.
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

    def __post_init__(self) -> None:
        super().__post_init__()
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
            _tokens(self.documents[number], self.key, number)[:, first:end]
            for number, first, end in self.blocks[index]
        ]
        return block(pieces, self.length, self.pad_token_id)


@dataclass(eq=False, repr=False)
class PackedStream(_Packing, IterableDataset[dict[str, Tensor]]):
    """Blocks of tokens from a stream of documents.

    It has a position (`state_dict`), from which reading continues with at most `window` documents read again
    (with a shuffle buffer of `datasets`, all), and can be split by rank where the documents can.

    Args:
        documents: an iterable of token sequences, or of mappings with one and perhaps `labels`; starts over
            each time.
        length: tokens of a block.
        how: "cut": documents one after the other, cut where a block is full. "whole": those of each window
            stay in one piece where a block can hold them (best fit, longest first).
        key: of the tokens in a mapping.
        pad_token_id: for what is left of a block.
        drop_last: with "cut", leave out the last block if it is not full.
        window: with "whole", how many documents to pack at a time.
    """

    _: KW_ONLY
    window: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.window, int) or self.window < 1:
            raise ParallelismValueError(
                f"window must be a positive number of documents, not {self.window!r}."
            )
        self._start: dict[str, Any] = {}
        self._place: dict[str, Any] = {}

    def set_epoch(self, epoch: int) -> None:
        """Starts at the beginning; calls the documents' own `set_epoch`, if they have one."""
        self._start = self._place = {}
        if callable(tell := getattr(self.documents, "set_epoch", None)):
            tell(epoch)

    def split(self, num_replicas: int, rank: int) -> Self:
        """The blocks of one rank's part of the documents."""
        return replace(self, documents=split(self.documents, num_replicas, rank))

    def state_dict(self) -> dict[str, Any]:
        """The position after the last block."""
        return dict(self._place)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to the position that `state_dict` returned, once."""
        self._start = self._place = dict(state)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        start, self._start = self._start, {}
        self._place = start
        blocks = self._cut if self.how == "cut" else self._whole
        yield from blocks(self._read(start.get("documents")), start.get("skip", 0))

    def _read(self, place: Any) -> Iterator[tuple[Any, Tensor]]:
        """Each document's tokens and labels, and before them the position where it is read."""
        rewind(self.documents)
        documents = with_position(self.documents)
        stateful = hasattr(documents, "load_state_dict")
        if stateful and place is not None:
            documents.load_state_dict(place)
        before = 0 if stateful else place or 0
        iterator = islice(iter(documents), before, None)
        for number in count(before):
            document = next(iterator, _END)
            if document is _END:
                return
            yield place, _tokens(document, self.key, number)
            place = documents.state_dict() if stateful else number + 1

    def _cut(self, documents: Iterator[tuple[Any, Tensor]], skip: int) -> Iterator[dict[str, Tensor]]:
        pieces: list[Tensor] = []
        free = self.length
        for place, tokens in documents:
            first, skip = skip, 0
            while first < tokens.shape[1]:
                pieces.append(tokens[:, first : first + free])
                first += pieces[-1].shape[1]
                free -= pieces[-1].shape[1]
                if not free:
                    made = block(pieces, self.length, self.pad_token_id)
                    pieces, free = [], self.length
                    self._place = {"documents": place, "skip": first}
                    yield made
        if pieces and not self.drop_last:
            self._place = {"documents": place, "skip": first}
            yield block(pieces, self.length, self.pad_token_id)

    def _whole(self, documents: Iterator[tuple[Any, Tensor]], skip: int) -> Iterator[dict[str, Tensor]]:
        while window := list(islice(documents, self.window)):
            blocks = _best_fit([tokens.shape[1] for _, tokens in window], self.length)
            for number, pieces in enumerate(blocks[skip:], skip + 1):
                self._place = {"documents": window[0][0], "skip": number}
                found = [window[document][1][:, first:end] for document, first, end in pieces]
                yield block(found, self.length, self.pad_token_id)
            skip = 0


_END = object()


def block(pieces: Sequence[Tensor], length: int, pad_token_id: int) -> dict[str, Tensor]:
    """One block of documents, or parts of them, and of padding up to `length`.

    Args:
        pieces: `(2, n)`: tokens and labels.
    """
    rest = length - sum(piece.shape[1] for piece in pieces)
    padding = [torch.tensor([[pad_token_id], [IGNORED]]).expand(2, rest)] if rest else []
    positions = torch.cat([torch.arange(piece.shape[1]) for piece in (*pieces, *padding)])
    tokens, labels = torch.cat([*pieces, *padding], dim=1)
    return {
        "input_ids": tokens,
        "labels": labels.masked_fill(positions == 0, IGNORED),
        "position_ids": positions,
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
        yield _tokens(documents[number], key, number)[0]


def _check_key(key: str, lacks: str, there: Collection[Any]) -> None:
    if key not in there:
        known = ", ".join(map(str, there))
        raise ParallelismValueError(f"{lacks} {key!r}; it has {known}. Tokenize it first.")


def _tokens(document: Any, key: str, number: int) -> Tensor:
    """A document's tokens and labels, `(2, n)`."""
    labels = None
    if isinstance(document, Mapping):
        _check_key(key, f"Document {number} has no", document)
        document, labels = document[key], document.get("labels")
    tokens = _sequence(document, number)
    labels = tokens if labels is None else _sequence(labels, number)
    if len(labels) != len(tokens):
        raise ParallelismValueError(
            f"Document {number} has {len(tokens)} tokens, but {len(labels)} labels; it needs one for each."
        )
    return torch.stack([tokens, labels])


def _sequence(document: Any, number: int) -> Tensor:
    try:
        tokens = torch.as_tensor(document)
    except (TypeError, ValueError, RuntimeError):
        tokens = None
    if tokens is None or tokens.ndim != 1 or (len(tokens) and tokens.is_floating_point()):
        raise ParallelismTypeError(
            f"Document {number} is not a sequence of tokens but a {type(document).__name__}; tokenize it."
        )
    return tokens.long()
