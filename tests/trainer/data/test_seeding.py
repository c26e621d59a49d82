"""Seeds."""

import random

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from composer_dist.random_states import seed_all
from tests.kit.compare import same, weights
from tests.kit.training import quiet, tagger
from tests.kit.world import World


def drawn() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), torch.rand(()).item()


def test_one_seed_for_all_generators() -> None:
    seed_all(3)
    first = drawn()
    seed_all(4)
    assert not set(first) & set(drawn())
    seed_all(3)
    assert drawn() == first
    seed_all(2**40)


def seeds() -> tuple[dict[str, Tensor], float]:
    with torch.device("meta"):
        model = tagger()
    torch.manual_seed(100 + dist.get_rank())
    quiet(model, parallelism_config="fsdp", seed=7)
    return weights(model), torch.rand(()).item()


def test_a_seed_initializes_alike_and_then_differs_by_rank(world2: World) -> None:
    (first, one), (second, other) = world2(seeds)
    same(first, second)
    assert one != other
    assert [number for _, number in world2(seeds)] == [one, other]
