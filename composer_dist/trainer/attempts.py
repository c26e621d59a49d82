"""A step that may run out of memory on one rank, and then ends on all of them, so that it can be redone.

A rank that runs out of memory leaves the others waiting in a collective that it never enters. So within an
attempt no rank enters a collective before all ranks of its group have reached it. They meet in the store:
the last rank to arrive says "go"; a rank that waits there while another one is in trouble says "stop". The
first word counts for the whole group, so no rank enters alone. This covers every collective, FSDP2's, DDP's,
tensor parallelism's and the user's own, because it watches what torch dispatches; compiled modules run
uncompiled for that. It costs some milliseconds per collective, in the few steps in which a size is tried.
"""

import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from composer_dist import _torch
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.distributed.ranks.board import Board
from composer_dist.distributed.ranks.waiting import poll
from composer_dist.distributed.replication.replica import replica_of
from composer_dist.errors import ParallelismRuntimeError, ParallelismValueError

T = TypeVar("T")
_TEXTS = (
    "out of memory",
    "can't allocate memory",  # torch's allocator for the CPU
    "ALLOC_FAILED",  # cuBLAS and cuDNN
)


class Attempts:
    """Runs steps that fit into the memory of every rank, or leave all ranks unchanged.

    The model's gradients must be those of the step and of nothing before.
    """

    def __init__(self, model: nn.Module) -> None:
        if not _torch.forgets_iterations and any(isinstance(m, FSDPModule) for m in model.modules()):
            raise ParallelismValueError(
                f"To recover from running out of memory, FSDP2 needs torch 2.13; this is {torch.__version__}."
            )
        self._model = model
        self._agreement = Agreement()

    def run(self, what: str, body: Callable[[], T]) -> tuple[T | None, str | None]:
        """What `body` returns; or, if a rank ran out of memory, None and the text of its error.

        Then gradients and whatever hooks had started are discarded, on every rank; the caller restores what
        else the body changed (buffers, random states). Any other failure is an error on every rank.

        Args:
            what: for errors.
            body: forward and backward; every rank runs the same collectives in it.
        """
        meetings = _Meetings(self._agreement)
        result, account, failure = None, None, None
        alone = len(self._agreement.ranks) == 1
        try:
            if alone:
                result = body()
            else:
                # Dynamo compiles nothing under such a mode, and raises where the whole graph is asked for.
                with torch.compiler.set_stance("force_eager"), Board.resting(), meetings:
                    result = body()
        except _StoppedError:
            pass
        except Exception as error:
            if not is_out_of_memory(error):
                if alone:
                    raise
                failure = error
            else:
                account = f"{type(error).__name__}: {error}"
                # Frames hold the activations for which there was no memory.
                traceback.clear_frames(error.__traceback__)
            meetings.stop()
        except BaseException as interrupt:
            meetings.stop()
            self._agreement.leave(interrupt, what)
            raise
        verdict: str | None = self._agreement.reach(what, account, _first, failure)
        if verdict is not None:
            result = None
            forget_step(self._model)
        return result, verdict


class _StoppedError(Exception):
    """Another rank is in trouble, and this one has not entered its next collective."""


def _first(accounts: list[str | None]) -> str | None:
    """The first account, and its rank."""
    return next((f"Rank {n}: {text}" for n, text in enumerate(accounts) if text), None)


class _Meetings(_torch.TorchDispatchMode):
    """Inside, the ranks of a group meet before each of its collectives."""

    def __init__(self, agreement: Agreement) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._agreement = agreement
        if len(agreement.ranks) > 1:
            self._store, self._prefix = agreement.place()
        self._met: Counter[tuple[int, ...]] = Counter()

    def stop(self) -> None:
        """Tell the others that this rank stops here."""
        if len(self._agreement.ranks) > 1:
            self._store.set(f"{self._prefix}/trouble", "")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it runs operations of its own, which are seen in their turn
        group = _torch.group_of_collective(func, args)
        if group is not None and group.size() > 1:
            self._meet(group, str(func))
        return func(*args, **(kwargs or {}))

    def _meet(self, group: dist.ProcessGroup, what: str) -> None:
        ranks = tuple(dist.get_process_group_ranks(group))
        self._met[ranks] += 1
        key = f"{self._prefix}/{ranks[0]}-{len(ranks)}-{hash(ranks)}/{self._met[ranks]}"
        if self._store.add(key, 1) == len(ranks):
            word = self._store.compare_set(f"{key}/word", "", "go")
        else:
            word = self._await_word(f"{key}/word", what)
        if word != b"go":
            raise _StoppedError

    def _await_word(self, key: str, what: str) -> bytes:
        limit = self._agreement.timeout
        for _ in poll(limit, lambda: f"the other ranks, to begin {what}"):
            if self._store.check([key]):
                return self._store.get(key)
            if self._store.check([f"{self._prefix}/trouble"]):
                return self._store.compare_set(key, "", "stop")
            if lost := self._agreement.lost():
                raise ParallelismRuntimeError(f"Rank {lost[0]} died before {what}; see its output.")
        raise ParallelismRuntimeError(
            f"Another rank did not reach {what} within {limit.total_seconds():.0f} s; every rank must run "
            "the same collectives in the same order. See the ranks' own output."
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host had no memory left."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


def forget_step(model: nn.Module) -> None:
    """Drop all gradients, and what an interrupted forward or backward left behind. Local."""
    _torch.forget_iteration(model)
    if (replica := replica_of(model)) is not None:
        replica.renew()
    for parameter in model.parameters():
        parameter.grad = None
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
