"""All ranks agree, or all raise.

Ranks agree through the process group's store, which answers within its time limit even if a peer is dead or
runs other code; a collective would hang. Every rank posts its finding; the first rank reads all of them,
decides, and posts one verdict for all. An error on any rank becomes the verdict: the same exception with the
same text everywhere. A rank that leaves without an answer (Ctrl-C) reports it, so that no rank waits for it.
Collectives run under `collectively`, so that a failure on one rank does not leave the others hanging in them.

After a failure the ranks start a new sequence of agreements, because they may be at different places in the
old one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from composer_dist import _torch
from composer_dist._torch import Store
from composer_dist.distributed.ranks.failures import LostError, is_lost, merge, pack, unpack
from composer_dist.distributed.ranks.line import MARGIN, Line, forget, line_of
from composer_dist.distributed.ranks.loopback import host_has_ended
from composer_dist.distributed.ranks.waiting import Task, poll
from composer_dist.errors import LostRankError, ParallelismError, ParallelismRuntimeError
from composer_dist.wording import ranks_named

T = TypeVar("T")
Post = dict[str, Any]
GRACE = timedelta(seconds=4)
"""How long the first rank waits for the other findings after a failure."""


class Agreement:
    """A series of agreements among the same ranks.

    Args:
        ranks: global ranks that take part, including this one; None means all. All must make the same
            calls in the same order.
        timeout: how long to wait for the others; None takes the process group's limit for a collective.
        line: separates agreements that another thread makes.
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
            step: what is agreed on, for error messages.
            mine: this rank's finding, in JSON types.
            decide: from all findings, in the order of `ranks`, to a JSON value; runs on the first rank, and
                may raise for all.
            error: what failed on this rank, if anything.

        Raises:
            ParallelismError: this rank's error, another's, or `decide`'s; or a rank did not answer.
        """
        post = {"step": step, "mine": mine, "error": error and pack(error), "lost": is_lost(error)}
        return self._agree(post, decide, self.timeout, error)

    @contextmanager
    def together(self, step: str) -> Iterator[None]:
        """Run a body without collectives on every rank: either it succeeds on all, or all raise."""
        with self._caught(step) as errors:
            yield
        self.reach(step, None, error=next(iter(errors), None))

    def each(
        self, step: str, body: Callable[[], T], decide: Callable[[list[T]], Any] = lambda findings: None
    ) -> Any:
        """`together` and `reach` in one: what `decide` makes of the results of `body` on all ranks."""
        mine: Any = None
        with self._caught(step) as errors:
            mine = body()
        return self.reach(step, mine, decide, next(iter(errors), None))

    @contextmanager
    def _caught(self, step: str) -> Iterator[list[Exception]]:
        """Keep an error for the others to raise as well; an interrupt is reported, and leaves."""
        errors: list[Exception] = []
        try:
            yield errors
        except Exception as caught:
            errors.append(caught)
        except BaseException as caught:
            self.leave(caught, step)
            raise

    def collectively(self, step: str, body: Callable[[], T]) -> T:
        """Run a body of collectives: if it fails on one rank, or a rank is lost, all raise the same error.

        It runs in a separate thread, because a collective without its peers cannot be canceled: when another
        rank reports trouble, this one abandons the thread. Ranks whose body succeeded raise at their next
        agreement. Without trouble nothing is exchanged.
        """
        if len(self.ranks) == 1:
            return body()
        task = Task(body)
        try:
            line = line_of(self._key)
            while not task.done.wait(0.1):
                if line.read("trouble"):
                    task.abandon(interrupted=False)
                    raise LostError("another rank is in trouble")
            return task.result()
        except Exception as caught:
            with suppress(RuntimeError):  # without a store the others know
                line_of(self._key).write("trouble", True)
            post = {"step": step, "mine": None, "error": pack(caught), "lost": is_lost(caught)}
            self._agree(post, lambda _: None, GRACE, caught)
            raise AssertionError from caught  # an agreement on an error always raises
        except BaseException as caught:
            task.abandon(interrupted=isinstance(caught, KeyboardInterrupt))
            self.leave(caught, step)
            raise

    def place(self) -> tuple[Store, str]:
        """The store, and a prefix for the keys that these ranks use until their next agreement."""
        line = line_of(self._key)
        return line.store, f"{line.prefix}/after/{line.count}"

    def lost(self) -> list[int]:
        """The ranks whose processes are known to have ended."""
        line = line_of(self._key)
        return [rank for rank in self.ranks if line.has_lost(rank)]

    def begin(self) -> None:
        """Start the sequence now, in the thread that owns the process group."""
        if len(self.ranks) > 1:
            line_of(self._key)

    def leave(self, cause: BaseException, step: str | None = None) -> None:
        """Tell the others not to wait for this rank; does nothing if they know the cause.

        Args:
            cause: why it leaves.
            step: what it was doing.
        """
        if len(self.ranks) == 1 or cause is self._raised:
            return
        with suppress(RuntimeError):  # without a store they know
            line = line_of(self._key)
            line.write("left", merge({self.rank: pack(cause)}, len(self.ranks), step))
            line.write("trouble", True)
        forget(self._key)

    def _agree(
        self, post: Post, decide: Callable[..., Any], limit: timedelta, error: BaseException | None
    ) -> Any:
        try:
            if len(self.ranks) > 1:
                return self._exchange(post, decide, limit)
            if post["error"]:
                raise unpack(*post["error"])
            return decide([post["mine"]])
        except Exception as failure:
            agreed = failure if isinstance(failure, ParallelismError) else unpack(*pack(failure))
            if isinstance(error, ParallelismError) and str(error) == str(agreed):
                agreed = error  # this rank's own, with the traceback of where it arose
            self._raised = agreed
            forget(self._key)
            if agreed is error:
                raise agreed from error.__cause__
            cause = error if agreed is failure else failure
            raise agreed from (None if is_lost(cause) else cause)
        except BaseException as interrupt:
            self.leave(interrupt, post["step"])
            raise

    def _exchange(self, post: Post, decide: Callable[..., Any], limit: timedelta) -> Any:
        try:
            line = line_of(self._key)
            line.count += 1
            if self.rank == self.ranks[0]:
                verdict = self._judge(line, post, decide, limit)
                line.write_verdict(verdict)
                if not verdict["error"]:  # all are here, so they have read the one before
                    with suppress(RuntimeError):  # the store may end now
                        line.forget(f"{line.count - 1}/verdict")
            else:
                line.write(f"{line.count}/{self.rank}", post)
                line.forget(f"{line.count - 1}/{self.rank}")  # while the others arrive
                verdict = self._await_verdict(line, post["step"], limit + MARGIN)
                with suppress(RuntimeError):
                    line.write(f"seen/{self.rank}", line.count)
        except ParallelismError as error:
            if host_has_ended() and is_lost(error):
                raise _absent([0], post["step"]) from None
            raise
        except RuntimeError as lost:
            raise LostRankError(
                f"The connection to the store was lost at {post['step']!r}: the launcher or rank 0, which "
                "hosts it, has ended early. See its output."
            ) from lost
        if verdict["error"]:
            raise unpack(*verdict["error"])
        return verdict["result"]

    def _judge(self, line: Line, post: Post, decide: Callable[..., Any], limit: timedelta) -> dict[str, Any]:
        step, first = post["step"], self.ranks[0]
        posts, ended = self._gather(line, step, {first: post}, limit, stop_at_error=True)
        if any(other["error"] for other in posts.values()):
            posts, ended = self._gather(line, step, posts, GRACE, stop_at_error=False)
        missing = [rank for rank in self.ranks if rank not in posts]
        errors = {rank: posts[rank]["error"] for rank in sorted(posts) if posts[rank]["error"]}
        causes = {rank: error for rank, error in errors.items() if not posts[rank].get("lost")}
        left = line.read("left") if missing else None
        try:
            if left and not causes:
                return {"error": left, "result": None}
            if missing and not causes:
                raise _absent(ended or missing, step, None if errors or ended else limit)
            if errors:
                return {"error": merge(causes or errors, len(self.ranks), step), "result": None}
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
        self, line: Line, step: str, known: Mapping[int, Post], limit: timedelta, stop_at_error: bool
    ) -> tuple[dict[int, Post], list[int]]:
        """Collect posts until all have arrived, a rank has left or ended, or time is up.

        The second result is the missing ranks whose processes have ended.
        """
        posts, keys = dict(known), {rank: f"{line.count}/{rank}" for rank in self.ranks if rank not in known}

        def absent() -> list[int]:
            return [rank for rank in keys if rank not in posts]

        there = line.expect([*keys.values()])
        for turn, _ in enumerate(poll(limit, lambda: f"{ranks_named(absent())} at {step!r}")):
            if found := line.read_all([*keys.values()], there):
                return {**posts, **dict(zip(keys, found, strict=True))}, []
            looked = turn % 4 == 3  # at their processes: a look costs more than reading the store
            ended = [rank for rank in absent() if looked and line.has_lost(rank)]
            for rank in absent():
                if post := line.read(keys[rank]):
                    posts[rank] = post
            if not absent() or line.read("left"):
                break
            if ended := [rank for rank in ended if rank not in posts]:
                return posts, ended  # their last posts have been read
            if stop_at_error and any(post["error"] for post in posts.values()):
                break
        return posts, []

    def _await_verdict(self, line: Line, step: str, limit: timedelta) -> Any:
        first, key = self.ranks[0], f"{line.count}/verdict"
        there = line.expect([key])
        for turn, _ in enumerate(poll(limit, lambda: f"rank {first}, which decides for all, at {step!r}")):
            if found := line.read_all([key], there):
                return found[0]
            if left := line.read("left"):
                return {"error": left}
            if turn % 4 == 3 and line.has_lost(first) and not line.read(key):
                raise _absent([first], step)
        raise _absent([first], step, limit)


def _absent(ranks: Sequence[int], step: str, limit: timedelta | None = None) -> LostRankError:
    """The error for ranks that died, or, with a limit, did not answer in time."""
    why = "died" if limit is None else f"did not answer within {limit.total_seconds():.0f} s"
    return LostRankError(f"{ranks_named(ranks).capitalize()} {why} at {step!r}; see the output there.")
