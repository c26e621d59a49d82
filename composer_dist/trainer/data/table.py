"""Rows of a table as tokens with a class, or with the tokens of another text."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from composer_dist.errors import ParallelismValueError
from composer_dist.trainer.data.rows import Row, RowTokenizer
from composer_dist.wording import listed, near_miss


@dataclass(frozen=True)
class TableTokenizer(RowTokenizer):
    """Makes `input_ids` of a column of text and `labels` of another column.

    A label that is a number is a class. One that is a string is the name of a class, if there are `classes`,
    and otherwise the text that a sequence-to-sequence model learns to write.

    Args:
        tokenizer: one of transformers'.
        text: the column of texts, or two columns whose texts make one sample.
        label: the column of labels.
        classes: their names, in the order of the model's outputs.
        max_length: cut longer texts.
    """

    tokenizer: Any
    _: KW_ONLY
    text: str | Sequence[str] = "text"
    label: str = "label"
    classes: Sequence[str] | None = None
    max_length: int | None = None

    def __call__(self, row: Row) -> dict[str, Any]:
        """The tokens and labels of a row.

        Raises:
            ParallelismValueError: a column is missing, or a label is not among the classes.
        """
        columns = [self.text] if isinstance(self.text, str) else self.text
        if missing := [name for name in (*columns, self.label) if name not in row]:
            known = ", ".join(row)
            raise ParallelismValueError(f"The table has no column {missing[0]!r}; it has {known}.")
        made = self._encode(*(row[name] for name in columns))
        kept = {name: values for name, values in made.items() if name in ("input_ids", "token_type_ids")}
        return kept | {"labels": self._labels(row[self.label])}

    def _labels(self, label: Any) -> Any:
        if label is None:
            raise ParallelismValueError(
                f"A row of the table has nothing in column {self.label!r}; remove it."
            )
        if not isinstance(label, str):
            number = int(label) if isinstance(label, bool) else label
            count = len(self.classes or ())
            if count and not (isinstance(number, int) and 0 <= number < count):
                raise ParallelismValueError(
                    f"The label {label!r} in column {self.label!r} is not the number of a class; there are "
                    f"{count}, from 0: {listed(self.classes or ())}."
                )
            return number
        if self.classes is None:
            return self._ended(self._encode(text_target=label)["input_ids"])
        if label not in self.classes:
            near = near_miss(label, self.classes)
            raise ParallelismValueError(
                f"There is no class {label!r}.{near} Classes: {listed(self.classes)}."
            )
        return self.classes.index(label)

    def _ended(self, tokens: list[int]) -> list[int]:
        """With the token that ends a text, which not every tokenizer adds."""
        end = self.tokenizer.eos_token_id
        if end is None or (tokens and tokens[-1] == end):
            return tokens
        return [*tokens[: None if self.max_length is None else self.max_length - 1], end]

    def _encode(self, *texts: str, **options: Any) -> Any:
        cut = {} if self.max_length is None else {"truncation": True, "max_length": self.max_length}
        return self.tokenizer(*texts, **cut, **options)
