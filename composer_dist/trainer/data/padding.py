"""Rows of different lengths as one batch."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from composer_dist.errors import ParallelismValueError
from composer_dist.trainer.data.packing import IGNORED


@dataclass(frozen=True)
class PadRows:
    """A `collate_fn` for rows of `input_ids`: pads at the end, to the longest row of the batch.

    A batch has `input_ids`, `labels`, `attention_mask` and what else the rows have; packed rows, with
    `position_ids`, get no mask. Sequences of labels are padded with -100, others with 0. Rows without
    `labels` have their tokens as labels, except those that their mask leaves out. A label that is a
    number, or a `label` as tables call it, stays one for each row. Columns of strings, and of None in all
    rows, are left out.

    Args:
        pad_token_id: for `input_ids`.
        multiple_of: the length of a batch is a multiple of this.
    """

    pad_token_id: int
    _: KW_ONLY
    multiple_of: int = 1

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """The batch.

        Raises:
            ParallelismValueError: rows have no `input_ids`, do not have the same columns, or a column has
                numbers in some of them only, or what makes no tensor.
        """
        if wrong := [number for number, row in enumerate(rows) if "input_ids" not in row]:
            raise ParallelismValueError(
                f"Row {wrong[0]} of a batch has no input_ids; it has {', '.join(rows[wrong[0]])}. Tokenize "
                "it first, for example with ChatTokenizer."
            )
        if len({frozenset(row) for row in rows}) > 1:
            raise ParallelismValueError("The rows of a batch do not all have the same columns.")
        columns = {("labels" if key == "label" else key): _numbers(rows, key) for key in rows[0]}
        columns = {key: values for key, values in columns.items() if values}
        masks = columns.get("attention_mask", [None] * len(rows))
        columns.setdefault("labels", list(map(_labels, columns["input_ids"], masks)))
        if "position_ids" not in columns:
            columns.setdefault("attention_mask", [[1] * len(ids) for ids in columns["input_ids"]])
        padding = {"input_ids": self.pad_token_id, "labels": IGNORED}
        return {key: self._named(key, values, padding.get(key, 0)) for key, values in columns.items()}

    def _named(self, key: str, values: Sequence[Any], padding: int) -> Tensor:
        try:
            return self._column(values, padding)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ParallelismValueError(
                f"Column {key!r} does not make one tensor: {error}. Each row needs one number there, or one "
                "list of numbers. Remove the column, or give a collate_fn of your own."
            ) from error

    def _column(self, values: Sequence[Any], padding: int) -> Tensor:
        tensors = [torch.as_tensor(value) for value in values]
        if any(one.ndim > 1 for one in tensors):
            raise ValueError("it has lists in lists")
        if not all(one.ndim for one in tensors):
            return torch.stack(tensors)
        longest = max(len(one) for one in tensors)
        size = -(-longest // self.multiple_of) * self.multiple_of
        dtypes = [one.dtype for one in tensors if len(one)] or [torch.long]  # an empty list has none
        made = torch.full((len(tensors), size), padding, dtype=reduce(torch.promote_types, dtypes))
        for row, one in zip(made, tensors, strict=True):
            row[: len(one)] = one
        return made


def _labels(tokens: Any, mask: Any) -> Any:
    """A row's tokens as labels, without those of padding."""
    if mask is None or (read := torch.as_tensor(mask)).shape != (len(tokens),):
        return tokens
    return torch.as_tensor(tokens).masked_fill(read == 0, IGNORED)


def _numbers(rows: Sequence[Mapping[str, Any]], key: str) -> list[Any]:
    """A column's values; none if no row has numbers there."""
    values = [row[key] for row in rows]
    without = [number for number, value in enumerate(values) if isinstance(value, str | None)]
    if len(without) == len(values):
        return []
    if without:
        raise ParallelismValueError(
            f"Column {key!r} is {values[without[0]]!r} in row {without[0]} of a batch, but other rows have "
            "numbers there. Give every row numbers, or remove the column."
        )
    return values
