"""The way that weights take from one rank to the others, chosen by itself.

Ranks of one host that may read each other's memory do so: each one copies its own rows from the
source's storage into its shards, all at once. Everybody else gets them by messages (`sync.deliver`),
and so does what has no plain address: tensors that are not contiguous.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Literal, Self

from torch.distributed.device_mesh import DeviceMesh

from composer_dist.distributed import peer_memory
from composer_dist.distributed.agreement import Agreement
from composer_dist.distributed.layout import Coordinate, grid
from composer_dist.distributed.peer_memory import Range
from composer_dist.distributed.sync import Cargo, deliver, take_slice
from composer_dist.errors import ParallelismRuntimeError

Way = Literal["memory", "messages"]


class Transport:
    """Delivers cargoes among the ranks of a mesh; a context manager, entered by all of them.

    Args:
        asked: "memory" or "messages" insists on one way, "auto" takes memory where it can.
        bucket_bytes: most bytes of one source that are on their way in messages at one time.

    Attributes:
        way: how contiguous tensors travel.
        moved: bytes that this rank has sent, received and read so far.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        agreement: Agreement,
        bucket_bytes: int,
        asked: Literal["auto", "memory", "messages"] = "auto",
    ) -> None:
        self.way: Way = "messages"
        self.moved = 0
        self._mesh = mesh
        self._here = Coordinate.of(mesh)
        self._agreement = agreement
        self._bucket_bytes = bucket_bytes
        self._asked = asked
        self._stack = ExitStack()
        self._pids: list[int] = []

    def __enter__(self) -> Self:
        """Nothing yet: the way is found when there is something to send."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """No longer permit others to read this process."""
        self._stack.close()

    def send(self, cargoes: Mapping[int, Sequence[Cargo]]) -> None:
        """Bring each cargo from its source rank to its targets on all ranks; returns when it is there.

        Args:
            cargoes: source rank (global) to its cargoes; the same, in the same order, on every rank.
        """
        if not any(cargoes.values()):
            return
        if not self._pids:
            self._find_way()
        if self.way == "memory":
            cargoes = self._read_from_peers(cargoes)
        if any(cargoes.values()):
            self.moved += self._agreement.collectively(
                "the delivery", lambda: deliver(cargoes, self._mesh, self._bucket_bytes)
            )

    def _find_way(self) -> None:
        """Find out, once, whether every rank can read every other.

        Raises:
            ParallelismRuntimeError: "memory" was asked for, and some rank cannot.
        """
        self._pids = [os.getpid()]
        if len(self._agreement.ranks) == 1 or self._asked == "messages":
            return
        beacon = peer_memory.Beacon()
        self._stack.enter_context(peer_memory.readable_by_siblings())
        shown = self._agreement.reach("the hosts", beacon.describe(), list)
        self._pids = [each["pid"] for each in shown]
        able = self._mesh.device_type == "cpu" and all(map(peer_memory.can_read, shown))
        if self._agreement.reach("whose memory can be read", able, self._decide):
            self.way = "memory"

    def _decide(self, able: list[bool]) -> bool:
        if self._asked == "memory" and not all(able):
            unable = [rank for rank, each in zip(self._agreement.ranks, able, strict=True) if not each]
            raise ParallelismRuntimeError(
                f"transport='memory' was asked for, but ranks {unable} cannot read the memory of all others "
                "(another host or container, the kernel refuses, or an accelerator); use 'auto'."
            )
        return all(able)

    def _read_from_peers(self, cargoes: Mapping[int, Sequence[Cargo]]) -> dict[int, list[Cargo]]:
        """Read what has an address; what has none is left, for messages."""
        me = self._agreement.rank
        mine = [
            peer_memory.address_of(cargo.source, cargo.dtype) if cargo.source is not None else None
            for cargo in cargoes.get(me, ())
        ]
        found: list[list[int | None]] = self._agreement.reach("the addresses", mine, list)
        addresses = dict(zip(self._agreement.ranks, found, strict=True))
        pids = dict(zip(self._agreement.ranks, self._pids, strict=True))
        left: dict[int, list[Cargo]] = {}
        with self._agreement.together("the delivery"):  # nobody lets go of its tensors before all have read
            for rank, items in cargoes.items():
                pairs = list(zip(items, addresses[rank], strict=True))
                left[rank] = [cargo for cargo, address in pairs if address is None]
                here = [(cargo, address) for cargo, address in pairs if address is not None]
                self.moved += self._copy(here, None if rank == me else pids[rank])
        return left

    def _copy(self, pairs: Sequence[tuple[Cargo, int]], pid: int | None) -> int:
        """Fill this rank's parts of cargoes that lie at these addresses of process `pid`, None for this one.

        Returns:
            The bytes read: by this rank, or from this rank by the others.
        """
        if pid is None:
            for cargo, _ in pairs:
                take_slice(cargo, self._mesh)
            return sum(self._read_by_others(cargo) for cargo, _ in pairs)
        ranges = [part for cargo, address in pairs for part in self._ranges(cargo, address)]
        peer_memory.read(pid, ranges)
        return sum(part.nbytes for part in ranges)

    def _read_by_others(self, cargo: Cargo) -> int:
        """Bytes that the other ranks together read of one cargo."""
        table = grid(self._mesh)
        everybody = (cargo.layout.part(Coordinate.in_grid(table, r)).numel for r in table.flatten().tolist())
        return (sum(everybody) - cargo.layout.part(self._here).numel) * cargo.dtype.itemsize

    def _ranges(self, cargo: Cargo, address: int) -> Iterator[Range]:
        size, target = cargo.dtype.itemsize, cargo.target.data_ptr()
        for first, length in cargo.layout.part(self._here).runs():
            yield Range(address + first * size, target, length * size)
            target += length * size
