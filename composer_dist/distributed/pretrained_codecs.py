"""Quantised weights from files that hold them dense.

What a shard holds may depend on the whole tensor (NF4 has a mean of all scales), so each tensor is read
and encoded by one rank, every rank its share of the tensors, and delivered from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from composer_dist.distributed.agreement import Agreement
from composer_dist.distributed.codecs import encoded
from composer_dist.distributed.pretrained import Pretrained
from composer_dist.distributed.sync import Cargo, inner_cargoes


def fill_encoded(
    pretrained: Pretrained,
    tensors: Mapping[str, torch.Tensor],
    device: torch.device,
    agreement: Agreement,
    send: Callable[[Mapping[int, Sequence[Cargo]]], None],
) -> None:
    """Fill tensors that have codecs; every rank calls it with the same ones.

    Args:
        tensors: of the model, by first name: full or sharded, and real.
        device: where values are encoded, one tensor at a time.
        send: brings cargoes from the ranks that have them to all.

    Raises:
        CheckpointRuntimeError: a file cannot be read, on whichever rank.
    """
    names, ranks = list(tensors), agreement.ranks
    for start in range(0, len(names), len(ranks)):
        turn = dict(zip(ranks, names[start : start + len(ranks)], strict=False))
        made: dict[str, torch.Tensor] = {}
        with agreement.together("reading the weights"):
            if (name := turn.get(agreement.rank)) is not None:
                whole = torch.empty(tensors[name].shape, dtype=tensors[name].dtype, device=device)
                pretrained.read(name, whole)
                made[name] = encoded(whole, tensors[name])
        send({rank: inner_cargoes(name, tensors[name], made.get(name)) for rank, name in turn.items()})
