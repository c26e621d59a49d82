"""Orders and shares, without data."""

import pytest

from composer_dist.trainer.data.order import batches_left, epoch_order, global_batches, share


def test_an_order_is_a_function_of_seed_and_epoch() -> None:
    first = [int(index) for index in epoch_order(50, True, seed=3, epoch=1)]
    assert first == [int(index) for index in epoch_order(50, True, seed=3, epoch=1)]
    assert sorted(first) == list(range(50))
    others = [epoch_order(50, True, seed, epoch) for seed, epoch in ((3, 2), (4, 1), (1, 3), (2, 2))]
    orders = {tuple(first), *(tuple(int(index) for index in order) for order in others)}
    assert len(orders) == 5  # seed 3 in epoch 1 is not seed 1 in epoch 3
    assert list(epoch_order(4, False, seed=3, epoch=1)) == [0, 1, 2, 3]


@pytest.mark.parametrize("replicas", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [0, 1, 4, 7, 15])
def test_shares_are_a_partition(replicas: int, length: int) -> None:
    shares = [share(10, 10 + length, replicas, rank) for rank in range(replicas)]
    assert [position for part in shares for position in range(*part)] == list(range(10, 10 + length))
    sizes = [end - first for first, end in shares]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("drop_last", [True, False])
def test_batches_from_anywhere(drop_last: bool) -> None:
    batches = list(global_batches(3, 14, 4, drop_last))
    assert batches == [(3, 7), (7, 11)] + ([] if drop_last else [(11, 14)])
    assert batches_left(3, 14, 4, drop_last) == len(batches)
    assert list(global_batches(14, 14, 4, drop_last)) == []
    assert batches_left(14, 14, 4, drop_last) == 0
    assert batches_left(16, 14, 4, drop_last) == 0  # a stream was shorter than its last batch
