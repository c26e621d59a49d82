"""Rows of a data set as tokens with labels."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from composer_dist import __version__
from composer_dist.errors import ParallelismError, ParallelismValueError
from composer_dist.trainer.data.packing import IGNORED
from composer_dist.users_code import warn

Tokens = list[int]
Row = Mapping[str, Any]
_CUT = "cut"


class RowTokenizer(ABC):
    """Makes tokens with labels of each row."""

    max_length: int | None
    columns: ClassVar[frozenset[str]] = frozenset({"input_ids", "labels"})
    """What it makes."""

    @abstractmethod
    def tokenized(self, row: Row) -> tuple[dict[str, Any], bool]:
        """What it makes of one row, and whether the row is longer than `max_length`."""

    def __call__(self, row: Row) -> dict[str, Any]:
        """What it makes of one row.

        Raises:
            ParallelismValueError: the row does not have what it needs.
            ParallelismTypeError: a value in the row is of another type.
        """
        return self.tokenized(row)[0]

    def map(self, rows: Any, **options: Any) -> Any:
        """What it makes of all rows, without those from which nothing can be learned.

        It warns how many rows are cut and how many are left out; for a stream, that there are some.

        Args:
            rows: a data set of `datasets`, map-style or iterable, or a sequence of rows.
            options: of its `map`, such as `num_proc`.

        Raises:
            ParallelismValueError: there are no rows, a row cannot be tokenized (its number and the beginning
                of its contents are in the message), or all of them are left out.
        """
        names = getattr(rows, "column_names", None)
        stream = hasattr(rows, "map") and not hasattr(rows, "__len__")
        if names is None and (first := next(iter(rows), None)) is not None:
            names = list(first)
        if not (names and (stream or len(rows))):
            raise ParallelismValueError("The data has no rows.")
        if not hasattr(rows, "map"):
            made = [self._counted(row, number) for number, row in enumerate(rows)]
            kept = [row for row in made if self.teaches(row)]
            self._report(len(made), len(kept), sum(row.pop(_CUT) for row in made))
            return kept
        filtering, options = options, {**options, "remove_columns": sorted(set(names) - self.columns)}
        if stream:
            return rows.map(self._of_stream, **options).filter(self._stays, **filtering)
        version = {"version": __version__}  # of what is in the cache of `datasets`
        made = rows.map(self._counted, with_indices=True, fn_kwargs=version, **options)
        kept = made.filter(self.teaches, **filtering)
        self._report(len(made), len(kept), sum(made[_CUT]))
        return kept.remove_columns(_CUT)

    @staticmethod
    def teaches(made: Row) -> bool:
        """Whether a row has a label."""
        labels = made["labels"]
        return not isinstance(labels, list) or any(label != IGNORED for label in labels)

    def _counted(self, row: Row, number: int | None = None, version: str = "") -> dict[str, Any]:
        """What it makes of a row, and whether the row is cut; errors name the row."""
        try:
            made, cut = self.tokenized(row)
        except ParallelismError as error:
            raise type(error)(f"{_named(row, number)}: {error}") from error
        except Exception as error:  # tokenizers raise whatever they like
            said = f"{type(error).__name__}: {error}"
            raise ParallelismValueError(f"{_named(row, number)} cannot be tokenized: {said}") from error
        return {**made, _CUT: cut}

    def _of_stream(self, row: Row) -> dict[str, Any]:
        made = self._counted(row)
        if made.pop(_CUT):
            warn(f"Rows longer than {self._limit} are cut.")  # said once
        return made

    def _stays(self, made: Row) -> bool:
        if not (stays := self.teaches(made)):
            warn(f"Rows are left out: {self._useless}.")
        return stays

    def _report(self, rows: int, kept: int, cut: int) -> None:
        if not kept:
            remedy = "" if self.max_length is None else " Raise max_length (in YAML data.context)."
            raise ParallelismValueError(f"None of {rows} rows is left: {self._useless}.{remedy}")
        facts = {f"longer than {self._limit} and cut": cut, f"left out: {self._useless}": rows - kept}
        for what, count in facts.items():
            if count:
                verb = "is" if count == 1 else "are"
                warn(f"{count} of {rows} rows {verb} {what}.")

    @property
    def _limit(self) -> str:
        return f"{self.max_length} tokens (max_length, in YAML data.context)"

    @property
    def _useless(self) -> str:
        """Why rows are left out."""
        where = "" if self.max_length is None else f"the first {self.max_length} tokens of "
        return f"{where}these rows contain nothing to learn"


def check_max_length(length: object) -> None:
    """Refuses lengths that would leave no label.

    Raises:
        ParallelismValueError: names the length.
    """
    if length is not None and (not isinstance(length, int) or length < 2):
        raise ParallelismValueError(
            "max_length (in YAML data.context) must be a number of tokens, at least 2, or None for no limit, "
            f"not {length!r}."
        )


def _named(row: Row, number: int | None) -> str:
    """A row by its number, counted from 0, and the beginning of its contents."""
    text = str(dict(row))
    contents = text if len(text) <= 160 else f"{text[:160]} ..."
    return f"A row ({contents})" if number is None else f"Row {number} ({contents})"
