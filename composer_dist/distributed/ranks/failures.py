"""How an error on one rank is sent to the others: as its kind and its text."""

import torch.distributed as dist

from composer_dist.errors import ParallelismError, in_words, kind_named, kind_of
from composer_dist.wording import ranks_named


class LostError(RuntimeError):
    """A collective was given up because of another rank."""


def is_lost(error: BaseException | None) -> bool:
    """Whether a collective or a read failed because of another rank."""
    words = "/gloo/", "Gloo", "NCCL", "Connection closed", "Connection reset", "No such process"
    return isinstance(error, (LostError, dist.DistError)) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )


def pack(error: BaseException) -> list[str]:
    """The kind and text of an error."""
    return [kind_of(error).__name__, in_words(error)]


def unpack(packed: list[str]) -> ParallelismError:
    """The inverse of `pack`, of our own kind."""
    name, text = packed
    return kind_named(name)(text)


def merge(failed: dict[int, list[str]], world: int, step: str | None) -> list[str]:
    """One error from those of several ranks: each different text once, with the ranks that have it.

    Args:
        step: what failed; an error that all ranks have alike needs neither ranks nor step.
    """
    by_text: dict[str, list[int]] = {}
    for rank, (_, text) in failed.items():
        by_text.setdefault(text, []).append(rank)
    kind = next(iter(failed.values()))[0]
    if len(by_text) == 1 and len(failed) == world:
        return [kind, next(iter(by_text))]
    lines = [f"{ranks_named(ranks).capitalize()}: {text}" for text, ranks in by_text.items()]
    return [kind, "\n".join(lines) + (f" (at {step!r})" if step else "")]
