"""Changes of values that nobody declares."""

import ctypes

import pytest
import torch
from torch import nn

from composer_dist.distributed.training.changes import Watch


@pytest.mark.promise(104)
@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex128, torch.bool]
)
def test_each_byte_that_a_kernel_writes_is_seen(dtype: torch.dtype, offset: int) -> None:
    """Wherever the tensor begins in its memory."""
    held = torch.zeros(offset + 13, dtype=dtype)[offset:]
    for byte in range(held.nbytes):
        before = Watch().before(nn.Identity(), {"held": held})
        assert before.changed({"held": held}) == []
        ctypes.memset(held.data_ptr() + byte, 1, 1)
        assert before.changed({"held": held}) == ["held"], byte
