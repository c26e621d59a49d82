"""Gathers sharded tensors, once the ranks have agreed that all of them gather the same ones."""

from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from composer_dist.distributed.moving.gather import full_tensors
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.errors import ParallelismValueError


def agree_on(
    step: str, tensors: Iterable[Any], names: list[str], error: Exception | None, options: str = ""
) -> bool:
    """Make sure that all ranks gather the same tensors in the same order; otherwise all raise.

    Args:
        tensors: of which some may be shards.
        names: the tensors that this rank would gather.
        error: this rank's error, if any.
        options: this rank's options as text.

    Returns:
        Whether ranks communicate: there is a shard.

    Raises:
        ParallelismError: `error`, of this rank or another.
        ParallelismValueError: the ranks have chosen different names or options.
    """
    if not any(isinstance(tensor, DTensor) for tensor in tensors):
        if error is not None:
            raise error
        return False
    agreement = Agreement()
    digest = sha256("\n".join([options, *names]).encode()).hexdigest()
    if not agreement.reach(step, digest, lambda found: len(set(found)) == 1, error):
        agreement.reach(step, [options, names], _alike)
    return True


def gather_full(
    tensors: Mapping[str, Tensor], everywhere: bool, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Full values by name, each tensor gathered once; {} on ranks that get none."""
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        first.setdefault(id(tensor), name)
    once = {name: tensors[name] for name in first.values()}

    def body() -> dict[str, Tensor]:
        return dict(full_tensors(once, everywhere=everywhere, dtype=dtype))

    sharded = any(isinstance(tensor, DTensor) for tensor in once.values())
    full = Agreement().collectively("gathering a state", body) if sharded else body()
    return {name: full[first[id(tensor)]] for name, tensor in tensors.items()} if full else {}


def _alike(found: list[list[Any]]) -> None:
    usual, first = found[0]
    for rank, (options, names) in enumerate(found):
        if options != usual:
            raise ParallelismValueError(
                f"Ranks 0 and {rank} pass different options: {usual} and {options}. Every rank must make the "
                "same call."
            )
        if names != first:
            odd = sorted(set(names) ^ set(first))
            raise ParallelismValueError(
                f"Ranks 0 and {rank} would gather different tensors: "
                f"{', '.join(odd) or 'the same ones in another order'}. Select the same on every rank."
            )
