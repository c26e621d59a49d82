"""The globs of what a run does not load from a checkpoint."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from composer_dist.users_code import warn


class Ignored:
    """Whether not to load a name; records which globs matched."""

    def __init__(self, globs: Sequence[str]) -> None:
        self._unused = list(globs)
        self._globs = tuple(globs)

    def __call__(self, name: str) -> bool:
        """Whether a glob matches the name or one of its parents."""
        hits = [glob for glob in self._globs if fnmatchcase(name, glob) or fnmatchcase(name, f"{glob}.*")]
        self._unused = [glob for glob in self._unused if glob not in hits]
        return bool(hits)

    def warn(self) -> None:
        """Warn of globs that matched nothing."""
        if self._unused:
            warn(
                f"load_ignore_keys: {', '.join(map(repr, self._unused))} matched nothing in the checkpoint. "
                "Names are such as 'model.head.weight', 'optimizer', 'data', 'callbacks.EarlyStopping/0'."
            )
