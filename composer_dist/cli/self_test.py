"""Whether the ranks reach each other, and how fast, to find out why a job hangs."""

import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from composer_dist.distributed.moving.memory import Beacon, can_read, readable_by_siblings
from composer_dist.distributed.ranks import process_group

_NBYTES = 32 << 20
_ROUNDS = 3


@dataclass(frozen=True)
class SelfTest:
    """The results; the same on every rank."""

    backend: str
    device: str
    hosts: list[str]
    """The host of each rank."""
    pairs: list[list[float]]
    """Bytes per second from one rank (row) to another (column), one pair at a time; 0 on the diagonal."""
    all_reduce: float
    """Bytes per second of a tensor that all ranks reduce."""
    right: bool
    """Whether a sum was correct on every rank."""
    memory: list[bool]
    """Whether each rank can read rank 0's memory, which is how weights travel within a host."""


def self_test(nbytes: int = _NBYTES) -> SelfTest:
    """Measure between all ranks of the process group; a collective. Rates are medians of three.

    Args:
        nbytes: of the tensor that travels.
    """
    world, rank = process_group.world_and_rank()
    payload = torch.ones(max(nbytes // 4, 1), device=process_group.device_of_group())
    pairs = [[0.0] * world for _ in range(world)]
    for source in range(world):
        for target in range(world):
            if source != target:
                pairs[source][target] = _rate(payload, _sender(payload, source, target, rank))
    reduced = _rate(payload, lambda: dist.all_reduce(payload, op=dist.ReduceOp.MAX)) if world > 1 else 0.0
    total = process_group.all_reduce(torch.arange(8) + rank, "sum")
    expected = world * torch.arange(8) + world * (world - 1) // 2
    with readable_by_siblings():
        beacon = Beacon()
        memory = process_group.gather_objects(can_read(process_group.broadcast(beacon.describe())))
    return SelfTest(
        backend=dist.get_backend(),
        device=payload.device.type,
        hosts=process_group.gather_objects(socket.gethostname()),
        pairs=pairs,
        all_reduce=reduced,
        right=process_group.all_ranks(torch.equal(total, expected)),
        memory=memory,
    )


def _sender(payload: torch.Tensor, source: int, target: int, rank: int) -> Callable[[], None]:
    """From one rank to another; the others do nothing."""

    def send() -> None:
        if rank == source:
            dist.send(payload, target)
        elif rank == target:
            dist.recv(payload, source)

    return send


def _rate(payload: torch.Tensor, work: Callable[[], None]) -> float:
    """Bytes per second, as the slowest rank measured them."""
    seconds = []
    for _ in range(_ROUNDS):
        process_group.barrier()
        begin = time.perf_counter()
        work()
        if payload.device.type != "cpu":
            torch.accelerator.synchronize(payload.device)
        seconds.append(process_group.all_reduce(time.perf_counter() - begin, "max"))
    return payload.nbytes / statistics.median(seconds)
