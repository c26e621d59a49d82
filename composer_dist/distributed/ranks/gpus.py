"""A GPU for each rank."""

import torch

from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.errors import ParallelismValueError


def check_own_gpu(device: torch.device) -> None:
    """Check that no two ranks of the default process group have the same GPU; every rank calls it.

    NCCL would fail at some later collective, on one of them.

    Raises:
        ParallelismValueError: two have the same, on every rank.
    """
    agreement = Agreement()
    identity = getattr(torch.cuda.get_device_properties(device), "uuid", agreement.rank)

    def decide(found: list[str]) -> None:
        for second, one in enumerate(found):
            if (first := found.index(one)) != second:
                raise ParallelismValueError(
                    f"Ranks {first} and {second} would share one GPU, and NCCL needs one for each rank. "
                    "Start at most as many processes on a machine as it has GPUs, or pass device='cpu'."
                )

    agreement.reach("one GPU for each rank", str(identity), decide)
