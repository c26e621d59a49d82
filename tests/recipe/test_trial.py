"""What is found about a run's optimizer before its first step."""

import pytest
import torch

from composer_dist.errors import ParallelismValueError
from composer_dist.recipe.trial import check_eps

pytestmark = pytest.mark.promise(109)


def test_an_eps_that_is_0_in_the_weights_dtype_is_refused() -> None:
    """Adam would divide by it, at any learning rate."""
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    with pytest.raises(ParallelismValueError, match=r"train are float16, in which optimizer.eps=1e-08 is 0"):
        check_eps(torch.optim.AdamW([weight]))
    check_eps(torch.optim.AdamW([weight], eps=1e-6))
    check_eps(torch.optim.SGD([weight]))
    check_eps(torch.optim.AdamW([torch.nn.Parameter(weight.bfloat16())]))
