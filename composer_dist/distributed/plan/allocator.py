"""What torch's caching allocator reserves on a device for the memory that a step uses.

The rules are those of c10/cuda/CUDACachingAllocator.cpp with its default settings: sizes are rounded to 512
bytes; blocks come from segments of 2 MiB (up to 1 MiB), of 20 MiB (up to 10 MiB) or of their own size,
rounded to 2 MiB; the smallest free block that is large enough is taken and split; free neighbors join.
Segments stay reserved. Left out: streams, expandable segments, and a full device, where unused segments are
returned.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass

MIB = 1 << 20
ROUND, SMALL, LARGE = 512, MIB, 10 * MIB
SMALL_SEGMENT, LARGE_SEGMENT, ROUND_SEGMENT = 2 * MIB, 20 * MIB, 2 * MIB


@dataclass(eq=False)
class Block:
    """A part of a segment; a segment's blocks are a list with two ends."""

    size: int
    start: int
    """In an address space in which segments do not touch."""
    is_small: bool
    is_free: bool = False
    before: "Block | None" = None
    after: "Block | None" = None


class Allocator:
    """Follows what is allocated and freed; `reserved` is in bytes, and never falls."""

    def __init__(self) -> None:
        self.reserved = 0
        self._used: dict[tuple[str, int], list[Block]] = defaultdict(list)
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}
        """By size and address, for small blocks and large ones."""

    def change(self, kind: str, nbytes: int) -> None:
        """Allocate `nbytes`, or free what was last allocated with this kind and size if it is negative."""
        if nbytes > 0:
            self._used[kind, nbytes].append(self._take(-(-nbytes // ROUND) * ROUND))
        elif nbytes < 0 and (held := self._used.get((kind, -nbytes))):
            self._give(held.pop())

    def _take(self, size: int) -> Block:
        small = size <= SMALL
        free = self._free[small]
        place = bisect_left(free, size, key=lambda one: one[0])
        block = free.pop(place)[2] if place < len(free) else self._segment(size, small)
        block.is_free = False
        left = block.size - size
        if left >= ROUND if small else left > SMALL:
            rest = Block(left, block.start + size, small, True, block, block.after)
            if block.after is not None:
                block.after.before = rest
            block.size, block.after = size, rest
            self._keep(rest)
        return block

    def _segment(self, size: int, small: bool) -> Block:
        if small:
            size = SMALL_SEGMENT
        elif size < LARGE:
            size = LARGE_SEGMENT
        else:
            size = -(-size // ROUND_SEGMENT) * ROUND_SEGMENT
        self.reserved += size
        return Block(size, self.reserved, small)

    def _give(self, block: Block) -> None:
        if (after := block.after) is not None and after.is_free:
            self._drop(after)
            block.size, block.after = block.size + after.size, after.after
            if block.after is not None:
                block.after.before = block
        if (before := block.before) is not None and before.is_free:
            self._drop(before)
            before.size, before.after = before.size + block.size, block.after
            if before.after is not None:
                before.after.before = before
            block = before
        self._keep(block)

    def _keep(self, block: Block) -> None:
        block.is_free = True
        insort(self._free[block.is_small], (block.size, block.start, block), key=lambda one: one[:2])

    def _drop(self, block: Block) -> None:
        free = self._free[block.is_small]
        free.pop(bisect_left(free, (block.size, block.start), key=lambda one: one[:2]))
