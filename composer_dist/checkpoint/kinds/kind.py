"""What each kind of content (model, optimizer, value) can do; `contents.KINDS` has their modules."""

from __future__ import annotations

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
    """What is restored, from which checkpoint."""

    opened: Opened
    state: MutableMapping[str, Any]
    models: list[nn.Module]
    """Those that the optimizers may belong to."""
    ignore: Callable[[str], bool]
    """Whether a name is left as it is."""
    mismatch: StateMismatch = field(default_factory=StateMismatch)
    """Collects what does not match."""


class Loading(Protocol):
    """One key of the state, about to be restored."""

    def prepare(self) -> None:
        """Make what values are read into; may raise, on this rank alone."""

    def load(self, agreement: Agreement) -> None:
        """Read, on all ranks together."""


class ContentKind(Protocol):
    """The functions of a module that is the home of one kind."""

    def owns(self, value: Any) -> bool:
        """Whether a value that the user passes is of this kind."""

    def extract(
        self, key: str, value: Any, models: list[nn.Module], chosen: Chosen | None, whole: bool
    ) -> Any:
        """What is saved of a value: its own tensors by name, sharded as they are.

        Args:
            whole: keep a tensor with a codec in one piece, to be decoded; otherwise its parts are saved.
        """

    def plan(self, restore: Restore, key: str) -> Loading:
        """Match a value with what is stored under its key; nothing changes yet."""

    def guess(self, code: Any) -> bool:
        """Whether something stored, encoded, looks like this kind."""
