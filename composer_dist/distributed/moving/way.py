"""The way that weights take from one rank to the others, chosen by itself.

Ranks that may read each other's memory do so: each one copies its own part from the source's storage
into its shards, all at once. To the other hosts weights go once each, and are read from the memory of
the rank that receives them (`host_relay`). Where every rank is alone they go by messages
(`sync.deliver`), and so does what has no plain address: tensors that are not contiguous, or not in
host memory. Targets on an accelerator are filled by way of host buffers (`staging`); there the other
hosts are served by messages, too, which its own network carries faster.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch.distributed.device_mesh import DeviceMesh

from composer_dist.distributed.mesh.layout import Coordinate, grid
from composer_dist.distributed.moving import memory as peer_memory
from composer_dist.distributed.moving.host_relay import Relay, find_hosts
from composer_dist.distributed.moving.memory import Range, Staging
from composer_dist.distributed.moving.transfer import Cargo, as_bytes, deliver, take_part
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.errors import ParallelismRuntimeError
from composer_dist.progress import Progress, Stage

Way = Literal["memory", "hosts", "messages"]


class Transport:
    """Delivers cargoes among the ranks of a mesh; a context manager, entered by all of them.

    Args:
        asked: a way insists on it, "auto" takes memory where it can, else hosts, else messages.
        bucket_bytes: most bytes of one source that are on their way in messages at one time.

    Attributes:
        way: how contiguous tensors travel.
        moved: bytes that this rank has sent, received and read so far.
        progress: shows the first rank how far long deliveries are.
    """

    staged = False
    """Whether host buffers are used for targets in host memory as well, for tests."""

    def __init__(
        self,
        mesh: DeviceMesh,
        agreement: Agreement,
        bucket_bytes: int,
        asked: Literal["auto", "memory", "hosts", "messages"] = "auto",
    ) -> None:
        self.way: Way = "messages"
        self.moved = 0
        self.progress = Progress(shown=agreement.rank == agreement.ranks[0])
        self._mesh = mesh
        self._table = grid(mesh)
        self._here = Coordinate.of(mesh)
        self._agreement = agreement
        self._bucket_bytes = bucket_bytes
        self._asked = asked
        self._stack = ExitStack()
        self._pids: dict[int, int] = {}
        self._hosts: list[tuple[int, ...]] = []

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
        with self.progress.stage("delivering weights") as stage:
            if self.way != "messages":
                cargoes = self._read_from_peers(cargoes, stage)
            if any(cargoes.values()):
                self.moved += self._agreement.collectively(
                    "the delivery", lambda: deliver(cargoes, self._mesh, self._bucket_bytes, stage)
                )

    def _find_way(self) -> None:
        """Find out, once, which ranks can read which.

        Raises:
            ParallelismRuntimeError: a way was asked for, and some rank cannot.
        """
        ranks = self._agreement.ranks
        self._pids = {self._agreement.rank: os.getpid()}
        if len(ranks) == 1 or self._asked == "messages":
            return
        beacon = peer_memory.Beacon()
        self._stack.enter_context(peer_memory.readable_by_siblings())
        shown = self._agreement.reach("the hosts", beacon.describe(), list)
        self._pids = {rank: each["pid"] for rank, each in zip(ranks, shown, strict=True)}
        able = [rank for rank, each in zip(ranks, shown, strict=True) if peer_memory.can_read(each)]
        chosen = self._agreement.reach("whose memory can be read", able, self._decide)
        self.way, self._hosts = chosen["way"], [tuple(host) for host in chosen["hosts"]]

    def _decide(self, able: list[list[int]]) -> dict[str, Any]:
        """The way, and the hosts, from the ranks that each rank can read."""
        ranks = self._agreement.ranks
        hosts = find_hosts(dict(zip(ranks, able, strict=True)))
        on_cpu = self._mesh.device_type == "cpu"
        possible: list[Way] = ["messages"]
        if hosts and len(hosts) < len(ranks) and on_cpu:
            possible.insert(0, "hosts")
        if hosts and len(hosts) == 1:
            possible.insert(0, "memory")
        if self._asked == "auto":
            return {"way": possible[0], "hosts": hosts or []}
        if self._asked in possible:
            return {"way": self._asked, "hosts": hosts or []}
        if self._asked == "memory":
            unable = [rank for rank, each in zip(ranks, able, strict=True) if len(each) < len(ranks)]
            why = f"ranks {unable} cannot read the memory of all others"
        elif not on_cpu:
            why = f"the model lives on {self._mesh.device_type}"
        elif hosts:
            why = "no rank can read the memory of another"
        else:
            why = "some ranks can read others' memory that cannot read theirs"
        raise ParallelismRuntimeError(
            f"transport={self._asked!r} was asked for, but {why} (another host or container, or the kernel "
            "refuses); use 'auto'."
        )

    def _read_from_peers(
        self, cargoes: Mapping[int, Sequence[Cargo]], stage: Stage
    ) -> dict[int, list[Cargo]]:
        """Read what has an address; what has none is left, for messages."""
        me = self._agreement.rank
        mine = [
            peer_memory.address_of(cargo.source, cargo.dtype) if cargo.source is not None else None
            for cargo in cargoes.get(me, ())
        ]
        found: list[list[int | None]] = self._agreement.reach("the addresses", mine, list)
        addresses = dict(zip(self._agreement.ranks, found, strict=True))
        left: dict[int, list[Cargo]] = {}
        near: dict[int, list[tuple[Cargo, int]]] = {}
        for rank, items in cargoes.items():
            pairs = list(zip(items, addresses[rank], strict=True))
            left[rank] = [cargo for cargo, address in pairs if address is None]
            near[rank] = [(cargo, address) for cargo, address in pairs if address is not None]
        if self.way == "hosts":
            relay = Relay(self._hosts, self._pids, self._table, me, self._bucket_bytes)
            sent = {rank: [cargo for cargo, _ in known] for rank, known in near.items()}
            self.moved += self._agreement.collectively("the delivery", lambda: relay.run(sent, stage))
        host = next(host for host in self._hosts if me in host)
        near = {rank: known for rank, known in near.items() if rank in host}
        stage.expect(sum(cargo.nbytes for known in near.values() for cargo, _ in known))
        with self._agreement.together("the delivery"):  # nobody lets go of its tensors before all have read
            for rank, known in near.items():
                self.moved += self._copy(known, rank, stage)
        return left

    def _copy(self, pairs: Sequence[tuple[Cargo, int]], rank: int, stage: Stage) -> int:
        """Fill this rank's parts of cargoes that lie at these addresses of a rank of this host.

        Returns:
            The bytes read: by this rank, or from this rank by the others of its host.
        """
        mine = rank == self._agreement.rank
        uploads: list[tuple[Cargo, int]] = []
        direct: list[tuple[Cargo, int]] = []
        for cargo, address in pairs:
            on_device = self.staged or cargo.target.device.type != "cpu"
            (uploads if on_device else direct).append((cargo, address))
        if uploads:
            self._upload(uploads, self._pids[rank], stage)
        if mine:
            for cargo, _ in direct:
                take_part(cargo, self._here)
                stage.advance(cargo.nbytes)
        else:
            peer_memory.read(self._pids[rank], [each for pair in direct for each in self._ranges(*pair)])
            stage.advance(sum(cargo.nbytes for cargo, _ in direct))
        host = next(host for host in self._hosts if rank in host)
        readers = [other for other in host if other != rank] if mine else [self._agreement.rank]
        return sum(self._part(cargo, reader) for cargo, _ in pairs for reader in readers)

    def _upload(self, pairs: Sequence[tuple[Cargo, int]], pid: int, stage: Stage) -> None:
        """Read and upload by way of host buffers."""

        def parcels() -> Iterator[tuple[torch.Tensor, Iterator[tuple[int, int]]]]:
            for cargo, address in pairs:
                yield as_bytes(cargo.target.view(-1)), self._runs(cargo, address)
                stage.advance(cargo.nbytes)

        Staging(pairs[0][0].target.device, self._bucket_bytes).read(pid, parcels())

    def _part(self, cargo: Cargo, rank: int) -> int:
        """Bytes of a rank's part."""
        return cargo.layout.part(Coordinate.in_grid(self._table, rank)).numel * cargo.dtype.itemsize

    def _runs(self, cargo: Cargo, address: int) -> Iterator[tuple[int, int]]:
        """Where this rank's part of a cargo at an address lies: (address, bytes), in order."""
        size = cargo.dtype.itemsize
        for first, length in cargo.layout.part(self._here).runs():
            yield address + first * size, length * size

    def _ranges(self, cargo: Cargo, address: int) -> Iterator[Range]:
        target = cargo.target.data_ptr()
        for theirs, nbytes in self._runs(cargo, address):
            yield Range(theirs, target, nbytes)
            target += nbytes
