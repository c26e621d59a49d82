"""A GPU for each rank."""

import os
from collections.abc import Sequence

import torch

from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.errors import ParallelismValueError


def check_own_gpu(device: torch.device) -> None:
    """Check that no two ranks of the default process group have the same GPU; every rank calls it.

    NCCL would fail at some later collective, on one of them. Its own variable NCCL_MULTI_RANK_GPU_ENABLE
    turns the check off. On AMD's GPUs, whose ids need not differ, nothing is checked.

    Raises:
        ParallelismValueError: two have the same, on every rank.
    """
    agreement = Agreement()
    off = torch.version.cuda is None or os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "0") != "0"

    def identity() -> str:
        return f"rank {agreement.rank}" if off else str(torch.cuda.get_device_properties(device).uuid)

    agreement.each("one GPU for each rank", identity, _refuse_equal)


def _refuse_equal(found: Sequence[str]) -> None:
    for second, one in enumerate(found):
        if (first := found.index(one)) != second:
            raise ParallelismValueError(
                f"Ranks {first} and {second} would share one GPU, and NCCL needs one for each rank. Start at "
                "most as many processes on a machine as it has GPUs, or pass device='cpu'."
            )
