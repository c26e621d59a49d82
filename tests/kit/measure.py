"""Measures what ranks send and how much memory a call takes."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from composer_dist import _torch
from composer_dist.distributed.moving import gather
from composer_dist.distributed.ranks.board import Board


def by_messages() -> Any:
    """Inside, what small units gather and reduce is sent in messages, also on one host."""
    return mock.patch.object(Board, "places", return_value=None)


class Collectives(TorchDispatchMode):
    """Counts collectives by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in {"c10d", "_c10d_functional"}:
            self.counts[func.__name__.partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def messages(bucket_bytes: int = gather.BUCKET_BYTES) -> Iterator[list[int]]:
    """Inside, buckets have this size; the bytes of each message that this rank gives to be gathered."""
    sent: list[int] = []
    send_to, all_gather = gather._send_to, _torch.all_gather_single

    def counted_send(root: int, ranks: Any, message: Tensor, joined: Any) -> None:
        sent.append(message.nbytes)
        send_to(root, ranks, message, joined)

    def counted_gather(joined: Tensor, message: Tensor, group: Any) -> None:
        sent.append(message.nbytes)
        all_gather(joined, message, group=group)

    with (
        mock.patch.object(gather, "_send_to", counted_send),
        mock.patch.object(_torch, "all_gather_single", counted_gather),
        mock.patch.object(gather, "BUCKET_BYTES", bucket_bytes),
    ):
        yield sent


def profiled(function: Any) -> int:
    """The most bytes that torch's allocator held above what it held at the start."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profile:
        torch.empty(16, device="cpu")
        function()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    probe, freed, *events = sorted(events, key=lambda event: event.start_ns())
    assert (probe.nbytes(), freed.nbytes()) == (64, -64), "the profiler has measured nothing"
    alive = peak = 0
    for event in events:
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


@contextmanager
def record(calls: set[torch.dtype], *names: str) -> Iterator[None]:
    """Patches the collective that torch uses, by its newest or older name, to note its dtype."""
    name = next(name for name in names if hasattr(dist, name))
    original = getattr(dist, name)

    def recording(*args: Any, **kwargs: Any) -> Any:
        calls.update(value.dtype for value in (*args, *kwargs.values()) if torch.is_tensor(value))
        return original(*args, **kwargs)

    with by_messages(), mock.patch.object(dist, name, recording):
        yield
