"""Ends a run in which a rank makes no progress, with a report of where every rank stands.

A thread in each rank writes into the process group's store what the rank does, and reads there whether
another rank has noticed a hang. Collectives of a run that hangs never return, so the thread ends the process.
A small watcher process (`watcher.py`) ends its rank if that thread cannot run.
"""

import math
import multiprocessing
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import cache
from itertools import count
from types import TracebackType
from typing import Self
from weakref import WeakSet

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler
from torch.optim.optimizer import register_optimizer_step_post_hook

from composer_dist import _torch
from composer_dist.distributed.ranks.hangs.beside import Beside
from composer_dist.distributed.ranks.hangs.exchange import ANSWER, Exchange, SilentError
from composer_dist.distributed.ranks.hangs.report import report
from composer_dist.distributed.ranks.hangs.stand import main_stack, stand_here
from composer_dist.distributed.ranks.reports import Report, told_to_all
from composer_dist.ending import Ending
from composer_dist.errors import ParallelismRuntimeError, ParallelismValueError, in_words

STATUS = 75
"""The exit status of a run that hangs: EX_TEMPFAIL of BSD's sysexits.h."""
_FAILED = 30.0
"""Seconds after a rank has failed or died in which the others should fail on their own."""
_FLOOR, _FACTOR, _ENOUGH = 300.0, 10.0, 3


class HangError(ParallelismRuntimeError):
    """What is reported to the launcher."""


class Limits:
    """The longest time without progress, for each section.

    Args:
        given: seconds, for all sections or some, or infinity for no limit. The limits of other sections are
            learned: ten times the longest time that has been seen, and at least 300 s.
    """

    def __init__(self, given: float | Mapping[str, float] | None) -> None:
        self._given = given
        self.first = 1800.0
        """Seconds, while a section has been seen fewer than three times."""
        self._longest: dict[str, float] = defaultdict(float)
        self._seen: dict[str, int] = defaultdict(int)

    @property
    def off(self) -> bool:
        """Whether there is none."""
        return self._given == math.inf

    def of(self, section: str) -> float:
        """Seconds."""
        if isinstance(self._given, Mapping):
            if section in self._given:
                return self._given[section]
        elif self._given is not None:
            return self._given
        if self._seen[section] < _ENOUGH:
            return max(self.first, self._longest[section] * _FACTOR)
        return max(_FLOOR, self._longest[section] * _FACTOR)

    def saw(self, section: str, seconds: float) -> None:
        """Learn from a time between two signs of progress."""
        self._longest[section] = max(self._longest[section], seconds)
        self._seen[section] += 1


class HangGuard:
    """Ends this process, and so the run, if a rank makes no progress inside of a `with`.

    Progress is a step of any optimizer, and `beat()`. When a rank has made none for too long, every rank
    prints one report: which rank is the first cause, and where each stands, with Python's stacks. Then it
    exits with status 75; nothing is cleaned up, and what was saved is intact. If a rank has failed or died,
    and others do not end on their own, the guard ends them after 30 s.

    ```python
    with HangGuard(timeout=60):
        for batch in dataloader:
            ...
    ```

    Args:
        timeout: the longest time without progress, in seconds or as a timedelta; or a mapping from section to
            that. None learns it, see `Limits`; until then it is the process group's timeout and 30 s.
        doing: says what this rank does at the moment; by default how many steps there have been.

    Raises:
        ParallelismValueError: a timeout that is not positive.
    """

    def __init__(
        self,
        timeout: float | timedelta | Mapping[str, float | timedelta] | None = None,
        *,
        doing: Callable[[], str] | None = None,
    ) -> None:
        given = {key: _seconds(one) for key, one in timeout.items()} if isinstance(timeout, Mapping) else None
        single = None if timeout is None or given is not None else _seconds(timeout)  # type: ignore[arg-type]
        self._limits = Limits(given or single)
        self.doing = doing or (lambda: f"step {self._steps}")
        """Says what this rank does at the moment."""
        self._steps = self._beats = 0
        self._at = time.monotonic()
        self._beside: Beside | None = None
        self._exchange: Exchange | None = None
        self._report: Report | None = None
        self.section = "step"
        """What this rank does, as `beat` was called with it."""

    def __enter__(self) -> Self:
        joined = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if joined:
            self._limits.first = _torch.collective_timeout().total_seconds() + _FAILED
        self._world = range(dist.get_world_size() if joined else 1)
        self._rank, self._number = dist.get_rank() if joined else 0, next(_numbers)
        self._beats += 1
        self._at, self._over = time.monotonic(), Ending()
        _register()
        _guards.add(self)
        self._thread = threading.Thread(target=self._run, daemon=True, name="composer_dist-hang-guard")
        self._telling = told_to_all(lambda: self.doing())
        self._report = self._telling.__enter__()
        if not self._limits.off:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        raised = error
        try:
            self._telling.__exit__(kind, error, trace)
        except BaseException as reason:
            raised = reason
            raise
        finally:
            self.close(raised)

    def close(self, error: BaseException | None = None) -> None:
        """Stop guarding; the other ranks may continue.

        Args:
            error: what has failed on this rank; the others end soon, if they do not fail too.
        """
        if self._over.is_set():
            return
        _guards.discard(self)
        self._over.set()
        if not self._limits.off:
            self._thread.join(2 * ANSWER)
        if self._beside:
            self._beside.close()
        if self._exchange:
            self._exchange.leave(f"{type(error).__name__}: {in_words(error)}" if error else "")
        self._beside = self._exchange = None

    @contextmanager
    def at(self, section: str) -> Iterator[None]:
        """Guard what is inside; where it is guarded already, only say which section it is."""
        outer = self.section
        with nullcontext() if self in _guards else self:
            self.beat(section)
            try:
                yield
            finally:
                self.beat(outer)

    def beat(self, section: str = "step") -> None:
        """Say that this rank has made progress.

        Args:
            section: what it does now; the limit of that counts until the next sign of progress.
        """
        now = time.monotonic()
        self._limits.saw(self.section, now - self._at)
        self._at, self.section = now, section
        self._beats += 1

    def step(self) -> None:
        """Count a step of an optimizer."""
        self._steps += 1
        self.beat(self.section)

    def _run(self) -> None:
        idle = failed = 0.0
        seen, before = self._beats, time.monotonic()
        limit = self._limits.of(self.section)
        while not self._over.wait(pause := min(max(limit / 20, 0.1), 2.0)):
            if self._beside is None:
                with suppress(OSError):  # no memory for a process: later
                    self._beside, self._exchange = self._begin()
                if self._beside is None:
                    continue
            noticed, trouble = self._told()
            now = time.monotonic()
            # A process that was stopped and continued has not been idle.
            idle, before = idle + min(now - before, 2 * pause + ANSWER), now
            limit = self._limits.of(self.section)
            self._beside.keep(limit)
            if seen != self._beats or (idle > limit and _in_debugger()):
                idle, seen = 0.0, self._beats
            failed = failed + pause if trouble else 0.0
            if noticed or idle > limit or failed > _FAILED:
                self._end(idle, limit)

    def _begin(self) -> tuple[Beside, Exchange | None]:
        """Start what takes a while; most guards are gone before."""
        beside = Beside()
        if len(self._world) == 1 or not dist.is_initialized():
            return beside, None
        return beside, Exchange(self._rank, self._world, self._number, beside.dump)

    def _told(self) -> tuple[bool, bool]:
        if self._report and self._report.known():  # the store may end any time
            return False, True
        with suppress(RuntimeError, SilentError):  # without a store, what this rank does next will fail
            if self._exchange:
                return self._exchange.tell(self.doing(), self._report)
        return False, False

    def _end(self, idle: float, limit: float) -> None:
        mine = stand_here(self._rank, self.doing(), idle)
        stands, stuck = self._exchange.gathered(mine) if self._exchange else ([mine], [])
        if self._over.is_set():  # this rank has failed, or ended, meanwhile
            return
        text = report(stands, limit, self.section)
        with suppress(OSError):
            sys.stdout.flush()
        with suppress(OSError):  # a full disk must not keep the run from ending
            print(f"composer_dist: {text}", file=sys.stderr, flush=True)
        with suppress(Exception):  # the launcher's file
            ErrorHandler().record_exception(HangError(text))
        if self._exchange:
            self._exchange.await_reports(stands)
        if self._beside:
            self._beside.doom(stuck)
        for child in multiprocessing.active_children():  # workers of data loaders, which may hang too
            child.kill()
        os._exit(STATUS)


_guards: WeakSet[HangGuard] = WeakSet()
_numbers = count()
"""Of guards, the same on all ranks."""


@cache
def _register() -> None:
    register_optimizer_step_post_hook(_stepped)


def _stepped(*given: object) -> None:
    for guard in tuple(_guards):
        guard.step()


def _seconds(timeout: float | timedelta) -> float:
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not seconds > 0:
        raise ParallelismValueError(f"timeout must be positive, not {timeout}.")
    return seconds


def _in_debugger() -> bool:
    """Whether the main thread waits for what somebody types into a debugger."""
    return any(frame.file.endswith(("/bdb.py", "/pdb.py")) for frame in main_stack())
