"""The segments that torch's caching allocator reserves, by hand from its constants."""

import pytest

from composer_dist.distributed.plan.memory import MIB, Allocator

pytestmark = pytest.mark.promise(111)


@pytest.mark.parametrize(
    ("changes", "reserved"),
    [
        ([1], 2),  # one small segment
        ([MIB, MIB - 511], 2),  # the second is rounded to 1 MiB and fills it
        ([MIB, MIB, 1], 4),
        ([MIB + 1], 20),  # one large segment
        ([MIB + 1, 15 * MIB], 20),  # the rest of it
        ([MIB + 1, 19 * MIB], 40),  # too little is left, so one of 20 MiB follows
        ([10 * MIB], 10),  # its own segment
        ([30 * MIB + 1], 32),
        ([30 * MIB, -30 * MIB, 20 * MIB, 10 * MIB], 30),  # the free block is split
        ([30 * MIB, -30 * MIB, 29 * MIB + 512, MIB // 2], 32),  # a rest of less than 1 MiB is not
        ([12 * MIB, 14 * MIB, -12 * MIB, -14 * MIB, 26 * MIB], 52),  # neighbors of two segments do not join
        ([20 * MIB, -20 * MIB, 9 * MIB, 11 * MIB, -9 * MIB, -11 * MIB, 20 * MIB], 20),  # those of one do
        ([40 * MIB, 30 * MIB, -40 * MIB, -30 * MIB, 28 * MIB, 40 * MIB], 70),  # the smallest that is enough
        ([-5], 0),  # nothing of this size is there
    ],
)
def test_segments_are_those_of_the_allocators_rules(changes: list[int], reserved: int) -> None:
    allocator = Allocator()
    for nbytes in changes:
        allocator.change("activations", nbytes)
    assert allocator.reserved == reserved * MIB
