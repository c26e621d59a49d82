"""All ranks agree, or all raise.

Ranks agree through the process group's store and not through collectives: a store answers within its
time limit even when a peer is dead or has taken another way, where a collective would hang. Every
rank posts what it found; the first rank reads all of it, decides, and posts one verdict that all
others wait for. An error on any rank becomes the verdict: the same exception, with the same text,
everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from composer_dist import _torch
from composer_dist._torch import Store
from composer_dist.errors import ParallelismError, ParallelismRuntimeError, kind_named, kind_of

T = TypeVar("T")

TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for the others, who may be reading a large model from a slow disk."""
_MARGIN = timedelta(seconds=15)
"""How much longer than the first rank the others wait, so that its verdict on who is missing comes."""


@dataclass
class _Line:
    """This process's place in the sequence of agreements over one store."""

    store: Store
    generation: int
    count: int = 0


_lines: dict[tuple[int, ...], _Line] = {}


class Agreement:
    """A series of agreements among the same ranks.

    Args:
        ranks: global ranks that take part, this one included; None means all. Each of them must
            call the same agreements in the same order; one that is elsewhere is named in an error.
        timeout: how long to wait for the others.
    """

    def __init__(self, ranks: Sequence[int] | None = None, timeout: timedelta = TIMEOUT) -> None:
        world = dist.get_world_size() if dist.is_initialized() else 1
        self.ranks = tuple(range(world)) if ranks is None else tuple(sorted(ranks))
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.timeout = timeout

    def reach(
        self,
        step: str,
        mine: T,
        decide: Callable[[list[T]], Any] = lambda findings: None,
        error: BaseException | None = None,
    ) -> Any:
        """Exchange findings and return what `decide` makes of them, the same on every rank.

        Args:
            step: what is being agreed on, for the error of a rank that is elsewhere.
            mine: this rank's finding, in plain JSON types.
            decide: from all findings, in the order of `ranks`, to a JSON value; runs on the first
                rank only, and may raise for all.
            error: what has gone wrong on this rank, if anything has.

        Raises:
            ParallelismError: this rank's error, another's, or `decide`'s; or a rank did not come.
        """
        if len(self.ranks) == 1:
            if error is not None:
                raise _unpack(_pack(error)) from error
            return decide([mine])
        line = _line(self.ranks)
        line.count += 1
        key = f"composer_dist/{self.ranks[0]}-{len(self.ranks)}/{line.generation}/{line.count}"
        post: dict[str, Any] = {"step": step, "mine": mine, "error": error and _pack(error)}
        verdict: dict[str, Any]
        if self.rank == self.ranks[0]:
            verdict = self._judge(line.store, key, step, post, decide)
            line.store.set(f"{key}/verdict", json.dumps(verdict))
        else:
            line.store.set(f"{key}/{self.rank}", json.dumps(post))
            verdict = self._receive(
                line.store, f"{key}/verdict", step, self.ranks[0], self.timeout + _MARGIN
            )
        if verdict["error"]:
            raise _unpack(verdict["error"]) from error
        return verdict["result"]

    @contextmanager
    def together(self, step: str) -> Iterator[None]:
        """Run a body without collectives on every rank: either it succeeds on all, or all raise."""
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        self.reach(step, None, error=error)

    def _judge(
        self,
        store: Store,
        key: str,
        step: str,
        post: dict[str, Any],
        decide: Callable[..., Any],
    ) -> dict[str, Any]:
        """The first rank's part: collect, compare, decide."""
        posts = {self.ranks[0]: post}
        try:
            for rank in self.ranks[1:]:
                posts[rank] = self._receive(store, f"{key}/{rank}", step, rank, self.timeout)
            for rank, other in posts.items():
                if other["step"] != step:
                    raise ParallelismRuntimeError(
                        f"Rank {rank} is at {other['step']!r} while rank {self.ranks[0]} is at {step!r}: "
                        "every rank must make the same calls in the same order."
                    )
            failed = {rank: other["error"] for rank, other in posts.items() if other["error"]}
            if failed:
                return {"error": _merge(failed, len(self.ranks)), "result": None}
            return {"error": None, "result": decide([other["mine"] for other in posts.values()])}
        except Exception as caught:
            return {"error": _pack(caught), "result": None}

    def _receive(
        self, store: Store, key: str, step: str, rank: int, timeout: timedelta
    ) -> dict[str, Any]:
        try:
            store.wait([key], timeout)
            return json.loads(store.get(key))  # type: ignore[no-any-return]
        except RuntimeError as lost:
            raise ParallelismRuntimeError(
                f"Rank {rank} did not reach {step!r} within {timeout.total_seconds():.0f} s, or the "
                f"connection to it was lost; see its own output. ({str(lost).splitlines()[0]})"
            ) from None


def _line(ranks: tuple[int, ...]) -> _Line:
    """The sequence for these ranks over the present store; a new process group starts a new one."""
    store = _torch._get_default_store()
    line = _lines.get(ranks)
    if line is None or line.store is not store:
        counter = f"composer_dist/{ranks[0]}-{len(ranks)}/generation/{dist.get_rank()}"
        line = _lines[ranks] = _Line(store, generation=store.add(counter, 1))
    return line


def _pack(error: BaseException) -> list[str]:
    text = str(error)
    if not isinstance(error, ParallelismError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return [kind_of(error).__name__, text]


def _unpack(packed: list[str]) -> ParallelismError:
    name, text = packed
    return kind_named(name)(text)


def _merge(failed: dict[int, list[str]], world: int) -> list[str]:
    """One error from those of several ranks: each different text once, with the ranks that have it."""
    by_text: dict[str, list[int]] = {}
    for rank, (_, text) in failed.items():
        by_text.setdefault(text, []).append(rank)
    kind = next(iter(failed.values()))[0]
    if len(by_text) == 1 and len(failed) == world:
        return [kind, next(iter(by_text))]
    lines = [f"{_spell(ranks)}: {text}" for text, ranks in by_text.items()]
    return [kind, "\n".join(lines)]


def _spell(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"Rank {shown}" if len(ranks) == 1 else f"Ranks {shown}"
