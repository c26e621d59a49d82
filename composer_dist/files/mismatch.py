"""Reports all differences between a stored state and its target together."""

from dataclasses import dataclass, field

from composer_dist.errors import CheckpointError, CheckpointKeyError, CheckpointValueError


@dataclass
class StateMismatch:
    """Names that only one side has, and values of different kinds, shapes or dtypes."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misfits: list[str] = field(default_factory=list)
    """Values of another kind, shape or dtype, each with its name."""

    def check(self, what: str, strict: bool) -> None:
        """Raise one error for all differences; missing and unexpected names count if `strict`.

        Args:
            what: the beginning of the message, "The state does not match the model".

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
        """The missing and unexpected names as text."""
        lists = (("missing", self.missing), ("unexpected", self.unexpected))
        return [f"{what}: {', '.join(names)}" for what, names in lists if names]

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.misfits)
