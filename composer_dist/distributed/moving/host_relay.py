"""One receiver per host: what the ranks of a host need crosses the network to it once.

Ranks that can read each other's memory form a *host*, led by the first of them. A *lane* carries the
parts of one source's cargoes that the same hosts need, from the source to the leader of the first of
them and from each leader to the next. In every *tick* a leader receives one bucket of a lane into its
staging memory and passes on the one before, while the ranks of its host read theirs out of that. What
only the leader needs goes straight into its target. The source's own host takes no part: its ranks
read the source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist

from composer_dist.distributed.mesh.layout import Coordinate, Layout, Part
from composer_dist.distributed.moving import memory as peer_memory
from composer_dist.distributed.moving.memory import Range
from composer_dist.distributed.moving.transfer import LARGE, Cargo, as_bytes
from composer_dist.progress import Stage
from composer_dist.tensors import arena

Host = tuple[int, ...]


_ENOUGH = 16 << 20
"""Bytes of a lane's bucket from which a larger one only delays those who wait for it."""


def find_hosts(readable: Mapping[int, Sequence[int]]) -> list[Host] | None:
    """Group ranks by whose memory they can read; None if that is not mutual.

    Args:
        readable: each rank to the ranks that it can read.
    """
    hosts = sorted({tuple(sorted({rank, *others})) for rank, others in readable.items()})
    return hosts if sum(map(len, hosts)) == len(readable) else None


@dataclass(frozen=True)
class _Piece:
    """The elements [start, stop) of a part of a cargo."""

    cargo: Cargo
    part: Part
    readers: Host
    """Ranks of this host that need the part."""
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.cargo.dtype.itemsize

    @property
    def target(self) -> torch.Tensor:
        """Bytes of this rank's own, which is among the readers."""
        return as_bytes(self.cargo.target.view(-1)[self.start : self.stop])

    @property
    def source(self) -> torch.Tensor:
        """Bytes of the full tensor, on the source rank."""
        assert self.cargo.source is not None
        return as_bytes(self.part.of(self.cargo.source, self.start, self.stop))


@dataclass(frozen=True)
class _Bucket:
    """Pieces that travel together: large ones by themselves, then the small ones in one message."""

    large: list[_Piece]
    small: list[_Piece]

    @cached_property
    def pieces(self) -> list[_Piece]:
        """In the order in which they lie in staging memory."""
        return self.large + self.small

    @cached_property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    def outgoing(self) -> Iterator[torch.Tensor]:
        """The source's messages."""
        yield from (piece.source for piece in self.large)
        if self.small:
            yield torch.cat([piece.source for piece in self.small])


@dataclass
class _Lane:
    """The way of some parts of one source's cargoes, as one of its ranks sees it."""

    source: int
    leaders: list[int]
    """Of the hosts that it leads through, in order."""
    position: int
    """This host's place among them; -1 on the source's."""
    buckets: list[_Bucket]
    slots: tuple[torch.Tensor, ...] = ()
    """The leader's staging memory, one bucket each."""
    offset: int = 0
    """Where the first slot starts in the leader's staging memory."""

    @cached_property
    def size(self) -> int:
        """Bytes of the largest bucket."""
        return max(bucket.nbytes for bucket in self.buckets)

    @property
    def ticks(self) -> int:
        """Until this host's ranks have read the last bucket, or the source has sent it."""
        return len(self.buckets) + self.position + 1


class Relay:
    """Brings cargoes from their sources to the ranks of all other hosts.

    Args:
        hosts: all ranks of the mesh, in groups.
        pids: of the ranks.
        table: the ranks as `(replicas, shards, tp)`.
        limit: bytes of a bucket, over all the lanes together: a leader stages two at most.
    """

    def __init__(
        self, hosts: Sequence[Host], pids: Mapping[int, int], table: torch.Tensor, me: int, limit: int
    ) -> None:
        self._hosts = hosts
        self._host_of = {rank: number for number, host in enumerate(hosts) for rank in host}
        self._here = self._host_of[me]
        self._leader, *self._others = hosts[self._here]
        self._pid = pids[self._leader]
        self._coordinates = {rank: Coordinate.in_grid(table, rank) for rank in self._host_of}
        self._me = me
        self._limit = limit
        self._address = 0

    def run(self, cargoes: Mapping[int, Sequence[Cargo]], stage: Stage) -> int:
        """Deliver; every rank must call it. Sources must be in host memory, and so must targets.

        Returns:
            Bytes that this rank has sent, received and read.
        """
        lanes = self._lanes(cargoes)
        staging = self._stage(lanes)
        stage.expect(sum(bucket.nbytes for lane in lanes for bucket in lane.buckets))
        shared = max((lane.ticks for lane in lanes if lane.position >= 0), default=0)
        moved = 0
        for tick in range(max((lane.ticks for lane in lanes), default=0)):
            moved += self._tick(lanes, tick, stage)
            if tick < shared:
                self._meet(staging)
        return moved

    def _tick(self, lanes: Sequence[_Lane], tick: int, stage: Stage) -> int:
        """Send, receive and read one bucket of each lane; returns the bytes."""
        operations = [each for lane in lanes for each in self._messages(lane, tick)]
        works = dist.batch_isend_irecv(operations) if operations else []
        moved = sum(operation.tensor.numel() for operation in operations)
        for lane in lanes:
            if 0 <= (number := tick - lane.position - 1) < len(lane.buckets):
                moved += self._take(lane, number)  # nothing on the source's own host
                stage.advance(lane.buckets[number].nbytes)
        for work in works:
            work.wait()
        return moved

    def _lanes(self, cargoes: Mapping[int, Sequence[Cargo]]) -> list[_Lane]:
        """The lanes that this rank sends into, or that lead through its host, in one order everywhere."""
        contents: dict[tuple[int, Host], list[tuple[Cargo, Part, Host]]] = {}
        routes: dict[tuple[Layout, int], list[tuple[Host, Part, Host]]] = {}
        for source, items in cargoes.items():
            home = self._host_of[source]
            for cargo in items:
                key = cargo.layout, home
                if key not in routes:
                    routes[key] = list(self._routes(*key))
                for leaders, part, readers in routes[key]:
                    content = contents.setdefault((source, leaders), [])
                    if source == self._me or readers:
                        content.append((cargo, part, readers))
        limit = min(self._limit // max(1, len(contents)), _ENOUGH)
        lanes = []
        for (source, leaders), content in contents.items():
            position = leaders.index(self._leader) if self._leader in leaders else -1
            if content and (source == self._me or position >= 0):
                lanes.append(_Lane(source, list(leaders), position, list(_pack(content, limit))))
        return lanes

    def _routes(self, layout: Layout, home: int) -> Iterator[tuple[Host, Part, Host]]:
        """Each part of a tensor: the leaders that it goes through, and who needs it on this host."""
        takers: dict[Part, list[int]] = {}
        for rank, at in self._coordinates.items():
            takers.setdefault(layout.part(at), []).append(rank)
        for part, ranks in takers.items():
            away = [rank for rank in ranks if self._host_of[rank] != home]
            if away and part.numel:
                chain = sorted({self._host_of[rank] for rank in away}, key=lambda host: (host < home, host))
                here = tuple(rank for rank in away if self._host_of[rank] == self._here)
                yield tuple(self._hosts[host][0] for host in chain), part, here

    def _stage(self, lanes: Sequence[_Lane]) -> torch.Tensor:
        """Share the leader's staging memory out among the lanes through its host."""
        offset = 0
        for lane in lanes:
            if lane.position >= 0:
                lane.offset, offset = offset, offset + 2 * lane.size
        size = offset if self._me == self._leader else 0
        staging = arena.empty((size,), torch.uint8, torch.device("cpu"))
        for lane in lanes if size else ():
            if lane.position >= 0:
                lane.slots = staging[lane.offset : lane.offset + 2 * lane.size].chunk(2)
        return staging

    def _messages(self, lane: _Lane, tick: int) -> Iterator[dist.P2POp]:
        """What this rank sends and receives in a lane at a tick."""
        at, buckets = lane.position, lane.buckets
        if lane.source == self._me and tick < len(buckets):
            for message in buckets[tick].outgoing():
                yield dist.P2POp(dist.isend, message, lane.leaders[0])
        if not lane.slots:
            return
        if 0 <= (number := tick - at) < len(buckets):
            giver = lane.leaders[at - 1] if at else lane.source
            for message in self._arriving(lane, number):
                yield dist.P2POp(dist.irecv, message, giver)
        if 0 <= (number := tick - at - 1) < len(buckets) and at + 1 < len(lane.leaders):
            for message in self._arriving(lane, number):
                yield dist.P2POp(dist.isend, message, lane.leaders[at + 1])

    def _arriving(self, lane: _Lane, number: int) -> Iterator[torch.Tensor]:
        """Where a bucket arrives on the leader: each large piece by itself, then the small ones in a row."""
        bucket, slot = lane.buckets[number], lane.slots[number % 2]
        start = 0
        for piece in bucket.large:
            yield piece.target if self._straight(piece) else slot[start : start + piece.nbytes]
            start += piece.nbytes
        if bucket.small:
            yield slot[start : bucket.nbytes]

    def _straight(self, piece: _Piece) -> bool:
        return piece.readers == (self._leader,) and piece.nbytes >= LARGE

    def _take(self, lane: _Lane, number: int) -> int:
        """Bring what has arrived on the leader into this rank's targets; returns the bytes read."""
        offset, ranges = 0, []
        slot = lane.offset + (number % 2) * lane.size
        for piece in lane.buckets[number].pieces:
            if self._me in piece.readers:
                if lane.slots and not self._straight(piece):
                    piece.target.copy_(lane.slots[number % 2][offset : offset + piece.nbytes])
                elif not lane.slots:
                    mine = piece.target.data_ptr()
                    ranges.append(Range(self._address + slot + offset, mine, piece.nbytes))
            offset += piece.nbytes
        if ranges:
            peer_memory.read(self._pid, ranges)
        return sum(part.nbytes for part in ranges)

    def _meet(self, staging: torch.Tensor) -> None:
        """Wait until all ranks of the host are through with the tick; they learn where the leader stages."""
        token = torch.tensor([staging.data_ptr()])
        if self._me == self._leader:
            for rank in self._others:
                dist.recv(torch.empty_like(token), rank)
            for rank in self._others:
                dist.send(token, rank)
        else:
            dist.send(token, self._leader)
            dist.recv(token, self._leader)
            self._address = int(token)


def _pack(content: Sequence[tuple[Cargo, Part, Host]], limit: int) -> Iterator[_Bucket]:
    """Cut parts into pieces, and gather these in buckets within the limit."""
    bucket, size = _Bucket([], []), 0
    for cargo, part, readers in content:
        step = max(1, limit // cargo.dtype.itemsize)
        for start in range(0, part.numel, step):
            piece = _Piece(cargo, part, readers, start, min(start + step, part.numel))
            if size and size + piece.nbytes > limit:
                yield bucket
                bucket, size = _Bucket([], []), 0
            (bucket.large if piece.nbytes >= LARGE else bucket.small).append(piece)
            size += piece.nbytes
    yield bucket
