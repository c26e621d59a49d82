"""How weights travel from one rank to the others: by memory or by messages.

If there is much to send and the ranks can read each other's memory, each one copies its own part from the
source's storage into its shards, all ranks at once; targets on an accelerator are filled through host
buffers (`memory.Staging`). Otherwise, and for tensors that have no plain address (not contiguous, or not in
host memory), weights travel by messages (`deliver.deliver`).
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self

import torch

from composer_dist.distributed.mesh.mesh import Mesh
from composer_dist.distributed.moving import memory
from composer_dist.distributed.moving.deliver import deliver, take_part
from composer_dist.distributed.moving.messages import Cargo
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.errors import ParallelismRuntimeError
from composer_dist.progress import Progress, Stage
from composer_dist.tensors.parts import as_bytes

Way = Literal["memory", "messages"]
FEW = 1 << 20
"""Fewer bytes than this are sent by messages sooner than the ranks find out whether they can read memory."""


@dataclass
class Transport:
    """Delivers cargoes among the ranks of a mesh; a context manager that all of them enter."""

    mesh: Mesh
    agreement: Agreement
    bucket_bytes: int
    """Most bytes of one source that are on their way in messages at one time."""
    asked: Literal["auto", "memory", "messages"] = "auto"
    """"auto" reads memory if it is worthwhile and every rank can; the others are binding."""
    way: Way = field(default="messages", init=False)
    """How contiguous tensors are sent."""
    moved: int = field(default=0, init=False)
    """Bytes that this rank has sent, received and read so far."""

    def __post_init__(self) -> None:
        self.progress = Progress(shown=self.agreement.rank == self.agreement.ranks[0])
        self._stack = ExitStack()
        self._pids: dict[int, int] = {}

    def __enter__(self) -> Self:
        """Do nothing yet: the way is chosen when there is something to send."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """No longer permit others to read this process."""
        self._stack.close()

    def send(self, cargoes: Mapping[int, Sequence[Cargo]]) -> None:
        """Bring each cargo from its source rank to its targets on all ranks; returns when it has arrived.

        The cargoes are the same, in the same order, on every rank; source ranks are global.
        """
        if not any(cargoes.values()):
            return
        few = sum(cargo.nbytes for items in cargoes.values() for cargo in items) < FEW
        if not self._pids and not (few and self.asked == "auto"):
            self._choose_way()
        with self.progress.stage("delivering weights") as stage:
            if self.way == "memory":
                cargoes = self._read_from_peers(cargoes, stage)
            if any(cargoes.values()):
                self.moved += self.agreement.collectively(
                    "the delivery", lambda: deliver(cargoes, self.mesh, self.bucket_bytes, stage)
                )

    def _choose_way(self) -> None:
        """Find out, once, whether all ranks can read each other."""
        ranks = self.agreement.ranks
        self._pids = {self.agreement.rank: os.getpid()}
        if len(ranks) == 1 or self.asked == "messages":
            return
        beacon = memory.Beacon()
        self._stack.enter_context(memory.readable_by_siblings())
        shown = self.agreement.reach("the hosts", beacon.describe(), list)
        self._pids = {rank: each["pid"] for rank, each in zip(ranks, shown, strict=True)}
        able = all(memory.can_read(each) for each in shown)
        self.way = self.agreement.reach("whose memory can be read", able, self._decide)

    def _decide(self, able: Sequence[bool]) -> Way:
        unable = [rank for rank, each in zip(self.agreement.ranks, able, strict=True) if not each]
        if unable and self.asked == "memory":
            raise ParallelismRuntimeError(
                f"transport='memory' was asked for, but ranks {unable} cannot read the memory of all others "
                "(another host or container, or the kernel refuses); use 'auto'."
            )
        return "messages" if unable else "memory"

    def _read_from_peers(
        self, cargoes: Mapping[int, Sequence[Cargo]], stage: Stage
    ) -> dict[int, list[Cargo]]:
        """Read the cargoes that have an address; return the others, which messages carry."""
        me = self.agreement.rank
        mine = [
            memory.address_of(cargo.source, cargo.dtype) if cargo.source is not None else None
            for cargo in cargoes.get(me, ())
        ]
        found: list[list[int | None]] = self.agreement.reach("the addresses", mine, list)
        addresses = dict(zip(self.agreement.ranks, found, strict=True))
        left: dict[int, list[Cargo]] = {}
        near: dict[int, list[tuple[Cargo, int]]] = {}
        for rank, items in cargoes.items():
            pairs = list(zip(items, addresses[rank], strict=True))
            left[rank] = [cargo for cargo, address in pairs if address is None]
            near[rank] = [(cargo, address) for cargo, address in pairs if address is not None]
        stage.expect(sum(cargo.nbytes for known in near.values() for cargo, _ in known))
        with self.agreement.together("the delivery"):  # no rank frees its tensors before all have read
            for rank, known in near.items():
                self.moved += self._copy(known, rank, stage)
        return left

    def _copy(self, pairs: Sequence[tuple[Cargo, int]], rank: int, stage: Stage) -> int:
        """Fill this rank's parts from a rank's memory; return the bytes that were read by it, or from it."""
        mine = rank == self.agreement.rank
        uploads = [pair for pair in pairs if _needs_upload(pair[0].target)]
        direct = [pair for pair in pairs if not _needs_upload(pair[0].target)]
        if uploads:
            self._upload(uploads, self._pids[rank], stage)
        if mine:
            for cargo, _ in direct:
                take_part(cargo, self.mesh.here)
                stage.advance(cargo.nbytes)
        else:
            ranges = [each for pair in direct for each in self._ranges(*pair)]
            memory.read(self._pids[rank], ranges, fresh=True)
            stage.advance(sum(cargo.nbytes for cargo, _ in direct))
        readers = [other for other in self._pids if other != rank] if mine else [self.agreement.rank]
        return sum(self._part(cargo, reader) for cargo, _ in pairs for reader in readers)

    def _upload(self, pairs: Sequence[tuple[Cargo, int]], pid: int, stage: Stage) -> None:
        """Read and upload by way of host buffers."""

        def parcels() -> Iterator[tuple[torch.Tensor, Iterator[tuple[int, int]]]]:
            for cargo, address in pairs:
                yield as_bytes(cargo.target.view(-1)), self._runs(cargo, address)
                stage.advance(cargo.nbytes)

        memory.Staging(pairs[0][0].target.device, self.bucket_bytes).read(pid, parcels())

    def _part(self, cargo: Cargo, rank: int) -> int:
        """Bytes of a rank's part."""
        return cargo.layout.part(self.mesh.at(rank)).numel * cargo.dtype.itemsize

    def _runs(self, cargo: Cargo, address: int) -> Iterator[tuple[int, int]]:
        """Where this rank's part of a cargo at an address lies: (address, bytes), in order."""
        size = cargo.dtype.itemsize
        for first, length in cargo.layout.part(self.mesh.here).runs():
            yield address + first * size, length * size

    def _ranges(self, cargo: Cargo, address: int) -> Iterator[memory.Range]:
        target = cargo.target.data_ptr()
        for theirs, nbytes in self._runs(cargo, address):
            yield memory.Range(theirs, target, nbytes)
            target += nbytes


def _needs_upload(target: torch.Tensor) -> bool:
    return target.device.type != "cpu"
