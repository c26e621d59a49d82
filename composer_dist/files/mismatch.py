"""Reports all differences between a stored state and its target together."""

from dataclasses import dataclass, field

from composer_dist.errors import CheckpointError, CheckpointKeyError, CheckpointValueError
from composer_dist.wording import listed


@dataclass
class StateMismatch:
    """Names that only one side has, and values of different kinds, shapes or dtypes."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misfits: list[str] = field(default_factory=list)
    """Values of another kind, shape or dtype, each with its name."""

    def check(self, what: str, strict: bool) -> None:
        """Raise one error for all differences; missing and unexpected names count if `strict`.

        It has the first eight names of each sort, the first three other values, and how many more there are.

        Args:
            what: the beginning of the message, "The state does not match the model".

        Raises:
            CheckpointValueError: values of another kind, shape or dtype.
            CheckpointKeyError: `strict`, and names are missing or unexpected.
        """
        if not self.misfits and not (strict and self):
            return
        names = self.names(most=8) if strict else []
        different = listed(self.misfits, 3, between="; ")
        misfits = [f"different kind, shape or dtype: {different}"] if different else []
        kind: type[CheckpointError] = CheckpointValueError if misfits else CheckpointKeyError
        hint = "" if misfits else " strict=False loads what matches."
        raise kind(f"{what}: {'. '.join(names + misfits)}.{hint}")

    def names(self, most: int | None = None) -> list[str]:
        """The missing and unexpected names as text, at most so many of each."""
        lists = (("missing", self.missing), ("unexpected", self.unexpected))
        return [f"{what}: {listed(names, most or len(names))}" for what, names in lists if names]

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.misfits)
