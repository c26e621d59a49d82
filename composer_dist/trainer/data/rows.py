"""Rows of a data set as tokens with labels."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from composer_dist.trainer.data.packing import IGNORED

Tokens = list[int]
Row = Mapping[str, Any]


class RowTokenizer(ABC):
    """Makes tokens with labels of each row."""

    columns: ClassVar[frozenset[str]] = frozenset({"input_ids", "labels"})
    """What it makes."""

    @abstractmethod
    def __call__(self, row: Row) -> dict[str, Any]:
        """What it makes of one row."""

    def map(self, rows: Any, **options: Any) -> Any:
        """What it makes of all rows, without those from which nothing can be learned.

        Args:
            rows: a data set of `datasets`, map-style or iterable, or a sequence of rows.
            options: of its `map`, such as `num_proc`.
        """
        if not hasattr(rows, "map"):
            return [made for made in map(self, rows) if self.teaches(made)]
        others = set(rows.column_names or next(iter(rows))) - self.columns
        made = rows.map(self, remove_columns=sorted(others), **options)
        kept = made.filter(self.teaches, **options)
        if hasattr(kept, "__len__") and len(kept) < len(made):
            warnings.warn(
                f"{len(made) - len(kept)} of {len(made)} rows are left out: within the greatest length, "
                "nothing can be learned from them.",
                stacklevel=2,
            )
        return kept

    @staticmethod
    def teaches(made: Row) -> bool:
        """Whether a row has a label."""
        labels = made["labels"]
        return not isinstance(labels, list) or any(label != IGNORED for label in labels)
