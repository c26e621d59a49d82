"""Measures what ranks send and how much memory a call takes."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from composer_dist import _torch
from composer_dist.distributed.moving import gather
from composer_dist.distributed.ranks.board import Board
from composer_dist.losses import logits
from composer_dist.tensors.nested import tensors_in


def by_messages() -> Any:
    """Inside, what small units gather and reduce is sent in messages, also on one host."""

    def places(board: Board, data: Tensor) -> None:
        """Without room; a `Mock` would keep the data."""

    return mock.patch.object(Board, "places", places)


class Collectives(TorchDispatchMode):
    """Counts collectives by name; `sent` has the collective, the ranks and the bytes of each as plans do."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.sent: list[tuple[str, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in {"c10d", "_c10d_functional"}:
            self.counts[func.__name__.partition(".")[0]] += 1
            if (group := _torch.group_of_collective(func, args)) is not None:
                self.sent.append(_sent(func, args, group.size()))
        return func(*args, **(kwargs or {}))


def with_reductions(run: Callable[..., Any], *args: Any, **options: Any) -> tuple[int, Any]:
    """How often a run reduces the gradients of sharded parameters, and what it returns."""
    with by_messages(), Collectives() as counted:
        found = run(*args, **options)
    return counted.counts["_reduce_scatter_base_"], found


class InTurn(TorchDispatchMode):
    """Has each collective end before the next operation, and gloo's thread let go of its tensors.

    Otherwise that thread frees them at any time later. It takes one piece of work after another, so it has
    dropped one when it has done the next. Needs groups with one thread each, as `world` makes them.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d" and (group := _torch.group_of_collective(func, args)) is not None:
            for work in result if isinstance(result, tuple) else (result,):
                if hasattr(work, "wait"):
                    work.wait()
            group.allreduce([torch.zeros(1)]).wait()
        return result


KINDS = {
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "broadcast_": "broadcast",
    "recv_": "send",
}
"""torch's operations by the names that plans have."""


def _sent(func: Any, args: Any, ranks: int) -> tuple[str, int, int]:
    name = func.__name__.partition(".")[0]
    place = 1 if name == "_reduce_scatter_base_" else 0
    nbytes = sum(one.nbytes for one in tensors_in(args[place]))
    return KINDS.get(name, name), ranks, nbytes * (ranks if name == "all_gather_into_tensor" else 1)


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
    return max(accumulate((event.nbytes() for event in events), initial=0))


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


@contextmanager
def losses_counted() -> Iterator[dict[str, int]]:
    """How often inside losses are computed in chunks, and logits computed whole."""
    counts = {"chunks": 0, "values": 0}

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            counts[name] += 1
            return function(*args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logits, "is_one_piece", noted("chunks", logits.is_one_piece))
        patch.setattr(logits.Logits, "values", noted("values", logits.Logits.values))
        yield counts
