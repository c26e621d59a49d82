"""All ranks agree, or all raise.

Ranks agree through the process group's store and not through collectives: a store answers within its
time limit even when a peer is dead or has taken another way, where a collective would hang. Every
rank posts what it found; the first rank reads all of it, decides, and posts one verdict that all
others wait for. An error on any rank becomes the verdict: the same exception, with the same text,
everywhere. A rank that leaves without an answer (Ctrl-C) says so, and nobody waits for it. Collectives
run under `collectively`, so that a failure on one rank does not leave the others inside of them.

After any failure the ranks start a new sequence of agreements, for they may be at different places
in the old one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from composer_dist import _torch
from composer_dist._torch import Store
from composer_dist.distributed.ranks.liveness import Identity, has_ended, identify
from composer_dist.distributed.ranks.waiting import Task, poll
from composer_dist.errors import ParallelismError, ParallelismRuntimeError, kind_named, kind_of
from composer_dist.wording import ranks_named

T = TypeVar("T")


Post = dict[str, Any]


GRACE = timedelta(seconds=4)
"""How long the first rank waits for the others' findings once one of them has failed."""


MARGIN = timedelta(seconds=4)
"""How much longer than the first rank the others wait, so that its verdict on who is missing comes."""


@dataclass
class _Line:
    """This process's place in a sequence of agreements over one store."""

    store: Store
    prefix: str
    count: int = 0
    processes: dict[int, Identity | None] = field(default_factory=dict)

    def has_lost(self, rank: int) -> bool:
        """Whether the process of `rank` is known to have ended."""
        if rank not in self.processes:
            if not self.store.check([f"{self.prefix}/process/{rank}"]):
                return False
            self.processes[rank] = _read(self, f"process/{rank}")
        return has_ended(self.processes[rank])


_Key = tuple[str, tuple[int, ...]]


_lines: dict[_Key, _Line] = {}


class Agreement:
    """A series of agreements among the same ranks.

    Args:
        ranks: global ranks that take part, this one included; None means all. Each of them must
            call the same agreements in the same order; one that is elsewhere is named in an error.
        timeout: how long to wait for the others; None takes the process group's limit for a
            collective.
        line: agreements of one line do not wait for those of another, which another thread may make.
    """

    def __init__(
        self, ranks: Sequence[int] | None = None, timeout: timedelta | None = None, line: str = ""
    ) -> None:
        world = dist.get_world_size() if dist.is_initialized() else 1
        self.ranks = tuple(range(world)) if ranks is None else tuple(sorted(ranks))
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.timeout = timeout or (_torch.collective_timeout() if world > 1 else timedelta(0))
        self._raised: BaseException | None = None
        self._key = line, self.ranks

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
        post = {"step": step, "mine": mine, "error": error and pack(error), "lost": is_lost(error)}
        return self._agree(post, decide, self.timeout, error)

    @contextmanager
    def together(self, step: str) -> Iterator[None]:
        """Run a body without collectives on every rank: either it succeeds on all, or all raise."""
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        except BaseException as caught:
            self.leave(caught)
            raise
        self.reach(step, None, error=error)

    def collectively(self, step: str, body: Callable[[], T]) -> T:
        """Run a body of collectives: where it fails on one rank, or one is lost, all raise the same.

        It runs in a thread of its own, for a collective whose peers have gone cannot be called back:
        when another rank reports trouble, this one leaves the thread to its own time limit. Ranks
        that got through learn of the trouble at their next agreement; there is none when all is well.

        Raises:
            ParallelismError: this rank's error or another's; ParallelismRuntimeError names a lost rank.
        """
        if len(self.ranks) == 1:
            return body()
        task = Task(body)
        try:
            line = _line(self._key)
            while not task.done.wait(0.1):
                if line.store.check([f"{line.prefix}/trouble"]):
                    task.abandon(interrupted=False)
                    raise _LostError("another rank is in trouble")
            return task.result()
        except Exception as caught:
            with suppress(RuntimeError):  # the store is gone: then the others know
                line = _line(self._key)
                line.store.set(f"{line.prefix}/trouble", "")
            post = {"step": step, "mine": None, "error": pack(caught), "lost": is_lost(caught)}
            self._agree(post, lambda _: None, GRACE, caught)
            raise AssertionError from caught  # an agreement on an error always raises
        except BaseException as caught:
            task.abandon(interrupted=isinstance(caught, KeyboardInterrupt))
            self.leave(caught)
            raise

    def place(self) -> tuple[Store, str]:
        """The store, and a prefix for what these ranks write there from here to their next agreement."""
        line = _line(self._key)
        return line.store, f"{line.prefix}/after/{line.count}"

    def lost(self) -> list[int]:
        """The ranks whose processes are known to have ended."""
        line = _line(self._key)
        return [rank for rank in self.ranks if line.has_lost(rank)]

    def begin(self) -> None:
        """Take up the line now, in the thread that owns the process group."""
        if len(self.ranks) > 1:
            _line(self._key)

    def leave(self, cause: BaseException) -> None:
        """Tell the others not to wait for this rank; does nothing where they know the cause."""
        if len(self.ranks) == 1 or cause is self._raised:
            return
        with suppress(RuntimeError):  # the store is gone: then they know
            line = _line(self._key)
            text = _merge({self.rank: pack(cause)}, len(self.ranks))
            line.store.set(f"{line.prefix}/left", json.dumps(text))
            line.store.set(f"{line.prefix}/trouble", "")
        _lines.pop(self._key, None)

    def _agree(
        self, post: Post, decide: Callable[..., Any], limit: timedelta, error: BaseException | None
    ) -> Any:
        try:
            if len(self.ranks) > 1:
                return self._exchange(post, decide, limit)
            if post["error"]:
                raise unpack(post["error"])
            return decide([post["mine"]])
        except Exception as failure:
            agreed = failure if isinstance(failure, ParallelismError) else unpack(pack(failure))
            if isinstance(error, ParallelismError) and str(error) == str(agreed):
                agreed = error  # this rank's own, with the traceback of where it arose
            self._raised = agreed
            _lines.pop(self._key, None)
            if agreed is error:
                raise agreed from error.__cause__
            raise agreed from (error if agreed is failure else failure)
        except BaseException as interrupt:
            self.leave(interrupt)
            raise

    def _exchange(self, post: Post, decide: Callable[..., Any], limit: timedelta) -> Any:
        step = post["step"]
        try:
            line = _line(self._key)
            line.count += 1
            key = str(line.count)
            if self.rank == self.ranks[0]:
                verdict = self._judge(line, key, post, decide, limit)
                line.store.set(f"{line.prefix}/{key}/verdict", json.dumps(verdict))
            else:
                line.store.set(f"{line.prefix}/{key}/{self.rank}", json.dumps(post))
                verdict = self._await_verdict(line, key, step, limit + MARGIN)
        except ParallelismError:
            raise
        except RuntimeError as lost:
            raise ParallelismRuntimeError(
                f"The connection to the store, which the launcher or rank 0 hosts, was lost at {step!r}; a "
                "process has ended early. See the ranks' own output."
            ) from lost
        if verdict["error"]:
            raise unpack(verdict["error"])
        return verdict["result"]

    def _judge(
        self, line: _Line, key: str, post: Post, decide: Callable[..., Any], limit: timedelta
    ) -> dict[str, Any]:
        """The first rank's part: collect, compare, decide."""
        step, first = post["step"], self.ranks[0]
        posts = {first: post}
        ended = self._gather(line, key, step, posts, limit, stop_at_error=True)
        if any(other["error"] for other in posts.values()):
            ended = self._gather(line, key, step, posts, GRACE, stop_at_error=False)
        missing = [rank for rank in self.ranks if rank not in posts]
        errors = {rank: posts[rank]["error"] for rank in sorted(posts) if posts[rank]["error"]}
        causes = {rank: error for rank, error in errors.items() if not posts[rank].get("lost")}
        left = _read(line, "left") if missing else None
        try:
            if left and not causes:
                return {"error": left, "result": None}
            if missing and not causes:
                why = "was lost" if errors or ended else f"did not come within {limit.total_seconds():.0f} s"
                raise ParallelismRuntimeError(
                    f"{ranks_named(ended or missing).capitalize()} {why} at {step!r}; see the output there."
                )
            if errors:
                return {"error": _merge(causes or errors, len(self.ranks)), "result": None}
            for rank, other in posts.items():
                if other["step"] != step:
                    raise ParallelismRuntimeError(
                        f"Rank {rank} is at {other['step']!r} while rank {first} is at {step!r}: every "
                        "rank must make the same calls in the same order."
                    )
            return {"error": None, "result": decide([posts[rank]["mine"] for rank in self.ranks])}
        except Exception as caught:
            return {"error": pack(caught), "result": None}

    def _gather(
        self, line: _Line, key: str, step: str, posts: dict[int, Post], limit: timedelta, stop_at_error: bool
    ) -> list[int]:
        """Collect posts until all are there, a rank has left or ended, or the time is over.

        Returns:
            The missing ranks whose processes are known to have ended.
        """

        def absent() -> str:
            return (
                f"{ranks_named([rank for rank in self.ranks if rank not in posts]).capitalize()} at {step!r}"
            )

        for _ in poll(limit, absent):
            ended = [rank for rank in self.ranks if rank not in posts and line.has_lost(rank)]
            for rank in self.ranks:
                if rank not in posts and (post := _read(line, f"{key}/{rank}")):
                    posts[rank] = post
            if len(posts) == len(self.ranks) or _read(line, "left"):
                return []
            if ended := [rank for rank in ended if rank not in posts]:
                return ended  # and what they posted before they ended has been read
            if stop_at_error and any(post["error"] for post in posts.values()):
                return []
        return []

    def _await_verdict(self, line: _Line, key: str, step: str, limit: timedelta) -> Any:
        for _ in poll(
            limit, lambda: f"{ranks_named(self.ranks[:1]).capitalize()}, which speaks for all, at {step!r}"
        ):
            if verdict := _read(line, f"{key}/verdict"):
                return verdict
            if left := _read(line, "left"):
                return {"error": left}
            if line.has_lost(self.ranks[0]) and not _read(line, f"{key}/verdict"):
                raise ParallelismRuntimeError(
                    f"Rank {self.ranks[0]} was lost at {step!r}; see the output there."
                )
        raise ParallelismRuntimeError(
            f"Rank {self.ranks[0]} did not come within {limit.total_seconds():.0f} s at {step!r}; see the "
            "output there."
        )


def _line(key: _Key) -> _Line:
    """The sequence for these ranks over the present store; a new process group starts a new one.

    One that is begun goes on where the process group is destroyed meanwhile, by another thread.
    """
    line = _lines.get(key)
    if line is not None and not dist.is_initialized():
        return line
    store = _torch.get_default_store()
    if line is None or line.store is not store:
        name, ranks = key
        base = f"composer_dist/{name}{ranks[0]}-{len(ranks)}-{hash(ranks)}"
        generation = store.add(f"{base}/generation/{dist.get_rank()}", 1)
        line = _lines[key] = _Line(store, f"{base}/{generation}")
        store.set(f"{line.prefix}/process/{dist.get_rank()}", json.dumps(identify()))
    return line


def _read(line: _Line, key: str) -> Any:
    """What a rank has written, or None if it has not yet."""
    key = f"{line.prefix}/{key}"
    return json.loads(line.store.get(key)) if line.store.check([key]) else None


class _LostError(RuntimeError):
    """A collective was given up because of another rank."""


def is_lost(error: BaseException | None) -> bool:
    """Whether a collective, or a read, failed because of another rank, and not by itself."""
    words = "gloo", "NCCL", "Connection", "No such process"
    return isinstance(error, (_LostError, dist.DistError)) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )


def pack(error: BaseException) -> list[str]:
    """An error as kind and text, to travel."""
    text = str(error)
    if not isinstance(error, ParallelismError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return [kind_of(error).__name__, text]


def unpack(packed: list[str]) -> ParallelismError:
    """The inverse of `pack`, of our own kind."""
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
    return [kind, "\n".join(f"{ranks_named(ranks).capitalize()}: {text}" for text, ranks in by_text.items())]
