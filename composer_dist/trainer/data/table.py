"""Rows of a table as tokens with a class, or with the tokens of another text."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.trainer.data.rows import Row, RowTokenizer, check_max_length
from composer_dist.wording import listed, near_miss


@dataclass(frozen=True)
class TableTokenizer(RowTokenizer):
    """Makes `input_ids` of a column of text and `labels` of another column.

    With `classes`, a label is the name of a class or its number, counted from 0; a number that is also a
    name, as in `classes=["1", "2", "3"]`, is the name. Without, a string is a text that a
    sequence-to-sequence model learns to write, and a number is the label itself.

    Args:
        tokenizer: one of transformers'.
        text: the column of texts, or two columns whose texts make one sample.
        label: the column of labels.
        classes: their names, in the order of the model's outputs.
        writes: labels are texts to write, numbers too.
        max_length: cut longer texts.
    """

    tokenizer: Any
    _: KW_ONLY
    text: str | Sequence[str] = "text"
    label: str = "label"
    classes: Sequence[str] | None = None
    writes: bool = False
    max_length: int | None = None

    def __post_init__(self) -> None:
        check_max_length(self.max_length)
        if self.writes and self.classes is not None:
            raise ParallelismValueError(
                "Labels are either texts to write or classes: pass writes or classes."
            )

    def tokenized(self, row: Row) -> tuple[dict[str, Any], bool]:
        """The tokens and labels of a row, and whether its texts are longer than `max_length`.

        Raises:
            ParallelismValueError: a column or a value is missing, or a label is not among the classes.
            ParallelismTypeError: a text is neither a string nor a number.
        """
        columns = [self.text] if isinstance(self.text, str) else self.text
        texts = [self._text(row, name) for name in columns]
        label = self._value(row, self.label)
        made, cut = self._encode(*texts)
        kept = {name: values for name, values in made.items() if name in ("input_ids", "token_type_ids")}
        if not self.writes and (self.classes is not None or not isinstance(label, str)):
            return kept | {"labels": self._class(label)}, cut
        target, cut_target = self._encode(text_target=str(label))
        return kept | {"labels": self._ended(target["input_ids"])}, cut or cut_target

    def _value(self, row: Row, column: str) -> Any:
        if column not in row:
            near = near_miss(column, list(row))
            raise ParallelismValueError(
                f"The table has no column {column!r}.{near} Its columns: {', '.join(row)}."
            )
        value = row[column]
        if value is None or value == "" or value != value:  # NaN is an empty cell of a table of numbers
            raise ParallelismValueError(f"Column {column!r} is empty. Remove the row.")
        return value

    def _text(self, row: Row, column: str) -> str:
        value = self._value(row, column)
        if not isinstance(value, str | int | float):
            raise ParallelismTypeError(f"Column {column!r} must hold text, not {type(value).__name__}.")
        return str(value)

    def _class(self, label: Any) -> Any:
        """The number of a class; without `classes`, the label."""
        whole = isinstance(label, bool) or (isinstance(label, float) and label.is_integer())
        number = int(label) if whole else label
        if self.classes is None:
            return number if isinstance(label, bool) else label
        lowered = [name.lower() for name in self.classes]
        if isinstance(label, bool) and str(label).lower() in lowered:
            return lowered.index(str(label).lower())
        if str(number) in self.classes:
            return self.classes.index(str(number))
        named_by_number = all(name.lstrip("-").isdigit() for name in self.classes)
        if isinstance(number, int) and 0 <= number < len(self.classes) and not named_by_number:
            return int(number)
        near = near_miss(label, self.classes) if isinstance(label, str) else ""
        raise ParallelismValueError(
            f"The label {label!r} in column {self.label!r} is neither the name nor the number of a class."
            f"{near} Known classes, numbered from 0: {listed(self.classes)}."
        )

    def _ended(self, tokens: list[int]) -> list[int]:
        """With the token that ends a text, which not every tokenizer adds."""
        end = self.tokenizer.eos_token_id
        if end is None or (tokens and tokens[-1] == end):
            return tokens
        return [*tokens[: None if self.max_length is None else self.max_length - 1], end]

    def _encode(self, *texts: str, **options: Any) -> tuple[Any, bool]:
        """The tokens, and whether they are cut."""
        whole = self.tokenizer(*texts, verbose=False, **options)
        if self.max_length is None or len(whole["input_ids"]) <= self.max_length:
            return whole, False
        return self.tokenizer(*texts, truncation=True, max_length=self.max_length, **options), True
