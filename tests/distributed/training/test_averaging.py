"""Means over ranks in few collectives."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from composer_dist.distributed.training import averaging
from tests.kit.world import World


def averages() -> int:
    rank = dist.get_rank()
    tensors = [torch.full((3, 2), float(rank)), torch.full((), 2.0 * rank), torch.ones(5).double() * rank]
    tensors.append(torch.arange(4.0).reshape(2, 2).t() + rank)
    with (
        mock.patch.object(averaging, "_BUCKET", 24),
        mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as calls,
    ):
        averaging.average(tensors, None)
    assert [tensor.dtype for tensor in tensors] == [
        torch.float32,
        torch.float32,
        torch.float64,
        torch.float32,
    ]
    torch.testing.assert_close(tensors[0], torch.full((3, 2), 0.5))
    torch.testing.assert_close(tensors[1], torch.tensor(1.0))
    torch.testing.assert_close(tensors[2], torch.full((5,), 0.5).double())
    torch.testing.assert_close(tensors[3], torch.arange(4.0).reshape(2, 2).t() + 0.5)
    return int(calls.call_count)


def test_tensors_of_any_layout_and_dtype_in_buckets(world2: World) -> None:
    assert world2(averages) == [4, 4]


def gradients() -> list[Any]:
    rank = dist.get_rank()
    everywhere, somewhere, nowhere = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    table = nn.Embedding(3, 2, sparse=True)
    everywhere.grad = torch.full((2,), 1.0 + rank)
    if rank == 1:
        somewhere.grad = torch.ones(2)
    table(torch.tensor([rank])).sum().backward()
    averaging.average_gradients([everywhere, somewhere, nowhere, table.weight])
    return [
        None if p.grad is None else p.grad.tolist() for p in (everywhere, somewhere, nowhere, table.weight)
    ]


def test_unused_parameters_count_as_zero_where_any_rank_used_them(world2: World) -> None:
    table = [[0.5, 0.5], [0.5, 0.5], [0.0, 0.0]]
    assert world2(gradients) == [[[1.5, 1.5], [0.5, 0.5], None, table]] * 2
