"""Numbers that a launcher has set, such as the world size; needs no torch."""

import os
from collections.abc import Mapping

from composer_dist.errors import ParallelismValueError


def launched_ranks(environ: Mapping[str, str] = os.environ) -> int:
    """The number of ranks that the launcher has started; 1 without a launcher."""
    return launched_number("WORLD_SIZE", environ) or 1


def is_rank_zero() -> bool:
    """Whether this process prints what all ranks find; so it does if its rank is not a number."""
    rank = os.environ.get("RANK") or "0"
    return not rank.isdecimal() or int(rank) == 0


def launched_number(name: str, environ: Mapping[str, str] = os.environ) -> int:
    """The number in the variable `name`; 0 if it is not set.

    Raises:
        ParallelismValueError: it is not a number.
    """
    value = environ.get(name) or "0"
    if not value.isdecimal():
        raise ParallelismValueError(
            f"The environment variable {name} is {value!r}, but must be a number. Start with torchrun, which "
            "sets it, or unset RANK and WORLD_SIZE to use one process."
        )
    return int(value)
