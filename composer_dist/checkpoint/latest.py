"""Finds the newest intact checkpoint, to resume from."""

import os

from composer_dist.checkpoint.background import finish_pending
from composer_dist.checkpoint.format.opened import open_checkpoint
from composer_dist.checkpoint.storage.place import place_of
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.errors import CheckpointError
from composer_dist.users_code import warn


def latest_checkpoint(directory: str | os.PathLike[str], *, verify: bool = True) -> str | None:
    """Return the path of the newest complete checkpoint in a directory, or None.

    All ranks call it. It skips damaged checkpoints with a warning.

    Args:
        directory: of checkpoints, a path or an fsspec URL; the first rank's is used.
        verify: compare all bytes with their checksums, every rank a share. `load_checkpoint` need not
            verify them again then.
    """
    return newest_intact(directory, verify)[0]


def newest_intact(directory: str | os.PathLike[str], verify: bool = True) -> tuple[str | None, list[str]]:
    """As `latest_checkpoint`, and the damaged checkpoints, which are newer than it or all there are."""
    finish_pending()
    agreement = Agreement()

    def look(asked: list[str]) -> list[list[str]]:
        place = place_of(asked[0])
        return [place.inside(), place.incomplete()]

    found, incomplete = agreement.reach("the checkpoints there are", os.fspath(directory), look)
    damaged: list[str] = []
    for path in found:
        try:
            with agreement.together("verifying a checkpoint"):
                opened = open_checkpoint(path)
                if verify:
                    opened.verify(agreement.ranks.index(agreement.rank), len(agreement.ranks))
        except CheckpointError as error:
            warn(f"Skipping {path}: {error}")
            damaged.append(path)
        else:
            return path, damaged
    return None, [*damaged, *incomplete]
