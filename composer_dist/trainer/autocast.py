"""The precision of the computation, as a context."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from composer_dist.precision import Precision


def autocast(precision: Precision | None, device: torch.device) -> AbstractContextManager[object]:
    """Runs forward and loss under torch's autocast where the precision is a mixed one.

    Under FSDP2 too, as in Composer: parameters are gathered in the low precision there, and
    autocast keeps norms, softmax and the loss in float32.
    """
    if precision in (None, Precision.FP32):
        return nullcontext()
    return torch.autocast(device.type, dtype=precision.dtype)
