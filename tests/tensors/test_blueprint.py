"""Blueprints: whatever moves elements moves them as torch does, and what computes is refused."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from composer_dist.errors import CheckpointValueError
from composer_dist.tensors.blueprint import Blueprint

SHAPES = [(6, 8), (48,), (2, 3, 8), (4, 3, 4), (3, 2, 2, 4), (1, 48, 1)]
STORED = {"a": torch.arange(48), "b": torch.arange(100, 148)}


def realize(blueprint: Blueprint) -> torch.Tensor:
    """The values that a blueprint describes; every element must come from exactly one box."""
    found = torch.zeros(tuple(blueprint.shape), dtype=torch.int64)
    count = torch.zeros_like(found)
    for box in blueprint.boxes:
        place = tuple(slice(at, at + size) for at, size in zip(box.start, box.sizes, strict=True))
        found[place] = STORED[box.source].as_strided(box.sizes, box.strides, box.offset)
        count[place] += 1
    assert (count == 1).all()
    return found


def moves(rng: random.Random, value: torch.Tensor) -> tuple[str, Callable[[Any], Any]]:
    """A random function that moves elements, and its name."""
    dim, other = rng.randrange(value.ndim), rng.randrange(value.ndim)
    order = rng.sample(range(value.ndim), value.ndim)
    parts = rng.choice([2, 3])
    first = rng.randrange(value.shape[0])
    numel, shape = value.numel(), []
    while numel > 1 and len(shape) < 4:
        shape.append(rng.choice([size for size in range(1, numel + 1) if numel % size == 0]))
        numel //= shape[-1]
    shape = rng.sample([*shape, numel], len(shape) + 1)
    return rng.choice(
        [
            ("transpose", lambda x: x.transpose(dim, other).contiguous()),
            ("permute", lambda x: x.permute(*order)),
            ("reshape", lambda x: x.reshape(shape)),
            ("reshape -1", lambda x: x.reshape(-1, shape[-1])),
            ("flatten", lambda x: x.flatten()),
            ("chunk", lambda x: torch.chunk(x, parts, dim=dim)[-1]),
            ("split", lambda x: torch.split(x, [1, x.shape[dim] - 1], dim=dim)[-(x.shape[dim] > 1)]),
            ("unbind", lambda x: torch.unbind(x, dim=dim)[-1] if x.ndim > 1 else x),
            ("slice", lambda x: x[first:, ...] if x.ndim == 1 else x[first:]),
            ("narrow", lambda x: x.narrow(dim, 0, 1)),
            ("unsqueeze", lambda x: x.unsqueeze(dim)),
            ("squeeze", lambda x: x.squeeze() if x.numel() > 1 else x),
        ]
    )


@pytest.mark.parametrize("seed", range(8))
def test_moved_elements_are_those_that_torch_moves(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        shape = rng.choice(SHAPES)
        made = [Blueprint.stored(name, shape, torch.float32) for name in STORED]
        values = [value.view(shape) for value in STORED.values()]
        join, dim = rng.choice([torch.cat, torch.stack]), rng.randrange(len(shape))
        blueprint, expected, done = join(made, dim=dim), join(values, dim=dim), [join.__name__]
        for _ in range(4):
            name, move = moves(rng, expected)
            blueprint, expected = move(blueprint), move(expected)
            done.append(name)
            assert tuple(blueprint.shape) == tuple(expected.shape), done
            assert torch.equal(realize(blueprint), expected), done


def test_what_computes_or_does_not_fit_is_refused() -> None:
    one, other = (Blueprint.stored(name, (6, 8), torch.float32) for name in STORED)
    for compute in (lambda: one + other, lambda: one.float().exp(), lambda: torch.where(one > 0, one, other)):
        with pytest.raises(CheckpointValueError, match="which needs values"):
            compute()
    with pytest.raises(CheckpointValueError, match=r"joins tensors of shapes \(6, 8\), \(8, 6\)"):
        torch.cat([one, other.t()], dim=0)
    with pytest.raises(CheckpointValueError, match="reshapes"):
        one.view(5, 5)
    with pytest.raises(CheckpointValueError, match="splits 6 rows"):
        one.split([1, 2])
    assert one.source == "a"
    assert one.t().source is None
    assert torch.cat([one, other]).source is None
