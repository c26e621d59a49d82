"""The interface of each kind of content (model, optimizer, value); `contents.KINDS` has their modules."""

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from composer_dist.checkpoint.format.opened import Opened
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.files.mismatch import StateMismatch

Chosen = Callable[[str, Any], bool]
"""The user's filter: whether a name and its value are saved."""


@dataclass
class Restore:
    """The checkpoint, and the state to restore from it."""

    opened: Opened
    state: MutableMapping[str, Any]
    models: list[nn.Module]
    """The models that the optimizers may belong to."""
    ignore: Callable[[str], bool]
    """Whether to skip a name."""
    mismatch: StateMismatch = field(default_factory=StateMismatch)


class Loading(Protocol):
    """The plan to restore one key of the state."""

    def prepare(self) -> None:
        """Make the tensors to read into; may raise, on this rank alone."""

    def load(self, agreement: Agreement) -> None:
        """Read the values; all ranks call it."""


class ContentKind(Protocol):
    """The functions in a kind's module."""

    def owns(self, value: Any) -> bool:
        """Whether a user's value is of this kind."""

    def extract(
        self, key: str, value: Any, models: list[nn.Module], chosen: Chosen | None, whole: bool
    ) -> Any:
        """The part of a value to save: its own tensors by name, sharded as they are.

        Args:
            whole: keep a tensor with a codec in one piece, to be decoded; otherwise save its inner tensors.
        """

    def plan(self, restore: Restore, key: str) -> Loading:
        """Match a value with the stored value of its key; nothing changes yet."""

    def guess(self, code: Any) -> bool:
        """Whether an encoded stored value looks like this kind."""
