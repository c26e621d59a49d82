"""How an error on one rank is sent to the others: kind, text, and whether the user's own code raised it."""

from typing import NamedTuple

import torch.distributed as dist

from composer_dist.errors import LostRankError, ParallelismError, in_words, kind_named, kind_of
from composer_dist.users_code import is_of_users_code
from composer_dist.wording import ranks_named


class LostError(RuntimeError):
    """A collective was given up because of another rank."""


def is_lost(error: BaseException | None) -> bool:
    """Whether a collective or a read failed because of another rank."""
    words = "/gloo/", "Gloo", "NCCL", "Connection closed", "Connection reset", "No such process"
    return isinstance(error, (LostError, LostRankError, dist.DistError)) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )


class PackedError(NamedTuple):
    """An error in JSON types."""

    kind: str
    text: str
    of_users_code: bool


def pack(error: BaseException) -> PackedError:
    """What the other ranks learn of an error."""
    return PackedError(kind_of(error).__name__, in_words(error), is_of_users_code(error))


def unpack(kind: str, text: str, of_users_code: bool) -> ParallelismError:
    """The inverse of `pack`, of our own kind."""
    error = kind_named(kind)(text)
    error.of_users_code = of_users_code
    return error


def merge(failed: dict[int, PackedError], world: int, step: str | None) -> PackedError:
    """One error from those of several ranks: each different text once, with the ranks that have it.

    Args:
        step: what failed; an error that all ranks have alike needs neither ranks nor step.
    """
    by_text: dict[str, list[int]] = {}
    for rank, (_, text, _) in failed.items():
        by_text.setdefault(text, []).append(rank)
    kind = next(iter(failed.values()))[0]
    users = any(of_users_code for _, _, of_users_code in failed.values())
    if len(by_text) == 1 and len(failed) == world:
        return PackedError(kind, next(iter(by_text)), users)
    lines = [f"{ranks_named(ranks).capitalize()}: {text}" for text, ranks in by_text.items()]
    return PackedError(kind, "\n".join(lines) + (f" (at {step!r})" if step else ""), users)
