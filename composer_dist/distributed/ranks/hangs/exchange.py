"""What the guards of the ranks write for each other into the store of the process group."""

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from composer_dist import _torch
from composer_dist.distributed.ranks.hangs.stand import Frame, Stand, State, stack_in
from composer_dist.distributed.ranks.line import asking
from composer_dist.distributed.ranks.liveness import Identity, identify, state_of
from composer_dist.distributed.ranks.reports import Report
from composer_dist.distributed.ranks.waiting import Task

T = TypeVar("T")
_GATHER = 5.0
"""Seconds in which the ranks say where they stand, once one has noticed a hang."""
ANSWER = 5.0
"""Seconds in which the store should answer."""
_LOOK = 0.1


class SilentError(Exception):
    """The store does not answer: the process that hosts it has been stopped."""


class Exchange:
    """The guards of one world with the same number.

    A store that does not answer would block this thread for good, so each call has a thread of its own, and
    the connection is its own because calls of one connection wait for one another.
    """

    def __init__(self, rank: int, ranks: Sequence[int], number: int, dump: str) -> None:
        self._rank, self._ranks = rank, ranks
        self._default: Any = _torch.get_default_store()
        self._store: Any = None
        self._dump = dump
        self._prefix = f"composer_dist/hang/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{number}"
        self._processes: dict[int, tuple[Identity | None, str]] = {}
        first = rank - int(os.environ.get("LOCAL_RANK", rank))
        self._here = ranks[first : first + int(os.environ.get("LOCAL_WORLD_SIZE", 1))]
        """The ranks of this host, as the launcher says."""
        self._unanswered: Task[Any] | None = None

    def tell(self, doing: str, report: Report | None) -> tuple[bool, bool]:
        """Say what this rank does; whether a rank has noticed a hang, and whether one has failed or died.

        Looks into the report, too, because its store may be gone once this rank needs it.
        """

        def call() -> tuple[bool, bool]:
            if report is not None:
                report.look(self._store)
            self._write("doing", doing)
            return self._has("hang"), self._has("failed") or any(map(self._died, self._here))

        return self._asked(call)

    def leave(self, error: str) -> None:
        """Say that this rank is not guarded any more, and with what it has failed, if it has."""

        def call() -> None:
            self._write("left", error)
            if error:
                self._store.set(f"{self._prefix}/failed", "")

        with suppress(RuntimeError, SilentError):
            self._asked(call)

    def _died(self, rank: int) -> bool:
        """Whether the process of another rank has ended without leaving."""
        return rank != self._rank and self._state(rank) == "ended" and self._read("left", rank) is None

    def gathered(self, mine: Stand) -> tuple[list[Stand], list[int]]:
        """Where all ranks stand; and the processes of this host that cannot report it and still run."""
        try:
            found = self._asked(lambda: self._exchanged(mine), 2 * _GATHER)
        except (RuntimeError, SilentError):
            found = {mine.rank: mine}
        known = {rank: identity for rank, (identity, _) in self._processes.items()}
        for rank in set(self._ranks) - found.keys():
            found[rank] = self._seen(rank) if rank in known else Stand(rank, state="silent")
        stands = [found[rank] for rank in self._ranks]
        stuck = [known.get(one.rank) for one in stands if one.state in ("stopped", "blocked")]
        return stands, [int(one[2]) for one in stuck if one and state_of(one)]

    def await_reports(self, stands: Sequence[Stand]) -> None:
        """Wait a moment until all ranks have printed: a launcher ends them when the first one has ended."""

        def call() -> None:
            self._write("printed", True)
            others = [one.rank for one in stands if one.state == "runs"]
            while not all(self._has(f"printed/{rank}") for rank in others):
                time.sleep(_LOOK)

        with suppress(RuntimeError, SilentError):
            self._asked(call)

    def _exchanged(self, mine: Stand) -> dict[int, Stand]:
        self._store.set(f"{self._prefix}/hang", "")
        self._write("stand", mine.packed())
        end = time.monotonic() + _GATHER
        found: dict[int, Stand] = {}
        while len(found) < len(self._ranks) and time.monotonic() < end:
            for rank in self._ranks:
                if rank not in found and (packed := self._read("stand", rank)):
                    found[rank] = Stand.unpacked(packed)
            time.sleep(_LOOK)
        missing = [rank for rank in self._ranks if rank not in found]
        for rank in missing:
            seen = self._seen(rank, self._read("doing", rank) or "")
            if (error := self._read("left", rank)) is not None:
                seen = Stand(rank, error, state="failed" if error else "left")
            if seen.state != "silent":  # others may be on other hosts
                self._store.set(f"{self._prefix}/seen/{rank}", json.dumps(seen.packed()))
            found[rank] = seen
        time.sleep(_LOOK * 5 if missing else 0)
        for rank in missing:
            if found[rank].state == "silent" and self._has(f"seen/{rank}"):
                found[rank] = Stand.unpacked(json.loads(self._store.get(f"{self._prefix}/seen/{rank}")))
        return found

    def _seen(self, rank: int, doing: str = "") -> Stand:
        """A rank that does not say where it stands, as this process sees it."""
        state, stack = self._state(rank), list[Frame]()
        if state == "blocked":
            with suppress(OSError), open(self._processes[rank][1], errors="replace") as file:
                stack = stack_in(file.read())
        return Stand(rank, doing, state=state, stack=stack)

    def _state(self, rank: int) -> State:
        """Of another rank, which is or should be silent."""
        if rank not in self._processes and (told := self._read("process", rank)):
            self._processes[rank] = told[0], told[1]
        found = state_of(self._processes.get(rank, (None, ""))[0])
        return "blocked" if found == "runs" else found or "silent"

    def _has(self, key: str) -> bool:
        return bool(self._store.check([f"{self._prefix}/{key}"]))

    def _asked(self, call: Callable[[], T], seconds: float = ANSWER) -> T:
        if self._unanswered and not self._unanswered.done.is_set():
            raise SilentError

        def connected() -> T:
            with asking():
                if self._store is None:
                    self._store = self._default.clone()
                    self._write("process", [identify(), self._dump])
                return call()

        self._unanswered = task = Task(connected)
        if not task.done.wait(seconds):
            raise SilentError
        return task.result()

    def _write(self, key: str, value: Any) -> None:
        self._store.set(f"{self._prefix}/{key}/{self._rank}", json.dumps(value))

    def _read(self, key: str, rank: int) -> Any:
        name = f"{self._prefix}/{key}/{rank}"
        return json.loads(self._store.get(name)) if self._store.check([name]) else None
