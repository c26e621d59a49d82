"""Tensors of other shapes and dtypes on each rank."""

import pytest
import torch
from torch import Tensor

from composer_dist.distributed.ranks.uneven import gather_uneven
from tests.kit.training import my_rank
from tests.kit.world import World

TENSORS = [
    torch.arange(6.0).reshape(2, 3),
    torch.tensor([True, False, True]),
    torch.tensor(-3, dtype=torch.int64),
    torch.zeros(2, 0, dtype=torch.bfloat16),
    torch.arange(3.0).reshape(1, 3)[:, 1],  # contiguous, with a stride of 3
    torch.arange(6.0).reshape(2, 3)[:, 1],
]


def gathered(mine: list[int], present: list[bool]) -> list[Tensor]:
    return gather_uneven(TENSORS[mine[my_rank()]], present[my_rank()])


@pytest.mark.promise(98)
@pytest.mark.parametrize("mine", [[0, 1], [1, 2], [3, 0], [3, 3], [4, 5]])
def test_each_rank_gets_the_tensors_of_those_that_are_present(mine: list[int], world2: World) -> None:
    for present in ([True, True], [True, False], [False, True], [False, False]):
        expected = [TENSORS[index] for index, one in zip(mine, present, strict=True) if one]
        for found in world2(gathered, mine, present):
            assert len(found) == len(expected)
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=0)
