"""What differs between a stored state and what it is loaded into, reported together."""

from __future__ import annotations

from dataclasses import dataclass, field

from composer_dist.errors import CheckpointError, CheckpointKeyError, CheckpointValueError


@dataclass
class StateMismatch:
    """Names that only one side has, and values that differ in more than their numbers."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misfits: list[str] = field(default_factory=list)
    """Values of another kind, shape or dtype, each with its name."""

    def check(self, what: str, strict: bool) -> None:
        """Raise for everything at once.

        Args:
            what: the beginning of the message, "The state does not match the model".
            strict: missing and unexpected names are errors too.

        Raises:
            CheckpointValueError: values of another kind, shape or dtype.
            CheckpointKeyError: `strict`, and names are missing or unexpected.
        """
        if not self.misfits and not (strict and self):
            return
        names = self.names() if strict else []
        misfits = [f"different kind, shape or dtype: {'; '.join(self.misfits)}"] if self.misfits else []
        kind: type[CheckpointError] = CheckpointValueError if misfits else CheckpointKeyError
        hint = "" if misfits else " strict=False loads what matches."
        raise kind(f"{what}: {'. '.join(names + misfits)}.{hint}")

    def names(self) -> list[str]:
        """What is missing and unexpected, in words."""
        lists = (("missing", self.missing), ("unexpected", self.unexpected))
        return [f"{what}: {', '.join(names)}" for what, names in lists if names]

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.misfits)
