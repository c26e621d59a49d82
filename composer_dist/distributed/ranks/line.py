"""A place in a sequence of agreements, and what its ranks write into the store there."""

import atexit
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, but not in its __all__

from composer_dist import _torch
from composer_dist._torch import Store
from composer_dist.distributed.ranks.liveness import Identity, has_ended, identify
from composer_dist.distributed.ranks.loopback import host_has_ended
from composer_dist.distributed.ranks.waiting import poll
from composer_dist.errors import LostRankError

Key = tuple[str, tuple[int, ...]]
"""The name of a sequence and its ranks."""
MARGIN = timedelta(seconds=4)
"""How much longer than the first rank the others wait, so that its verdict on missing ranks arrives."""

_MOMENT = timedelta(milliseconds=50)
"""Short, because meanwhile other threads cannot use the store, and Ctrl-C has no effect."""
_PIECE = 4 << 20
"""Bytes of a long text under one key: the store closes the connection over 8 MiB (torch 2.13)."""


@dataclass
class Line:
    """This process's place in a sequence of agreements over one store."""

    store: Store
    prefix: str
    key: Key
    count: int = 0
    judged: int = 0
    """The number of the newest verdict that this process has written."""
    processes: dict[int, Identity | None] = field(default_factory=dict)
    pieces: dict[str, int] = field(default_factory=dict)
    """The keys of long texts that this process has written, each with the number of their pieces."""

    def read(self, key: str) -> Any:
        """What a rank has written; None if it has not written yet."""
        key = f"{self.prefix}/{key}"
        with asking():
            return self._parsed(key, self.store.get(key)) if self.store.check([key]) else None

    def read_all(self, keys: Sequence[str], there: bool = False) -> list[Any] | None:
        """What ranks have written under all of these keys; None if something is missing.

        Args:
            there: whether `expect` has said that nothing is missing.
        """
        names = [f"{self.prefix}/{key}" for key in keys]
        with asking():
            if not (there or self.store.check(names)):
                return None
            return list(map(self._parsed, names, self.store.multi_get(names)))

    def expect(self, keys: Sequence[str]) -> bool:
        """Give ranks a moment to write under all of these keys, and say whether they have.

        Unlike polling, this ends when they have.
        """
        if wakes(self.store):
            with asking(), suppress(RuntimeError):  # also if the store is lost, which the next call reports
                self.store.wait([f"{self.prefix}/{key}" for key in keys], _MOMENT)
                return True
        return False

    def _parsed(self, name: str, text: bytes) -> Any:
        if text.startswith(b"/"):  # instead of JSON, the number of its pieces
            text = b"".join(self.store.get(f"{name}/{number}") for number in range(int(text[1:])))
        return json.loads(text)

    def write(self, key: str, value: Any) -> None:
        """Write what this rank has to say, in JSON types."""
        name, text = f"{self.prefix}/{key}", json.dumps(value)
        starts = range(0, len(text), _PIECE)
        with asking():
            if len(starts) > 1:
                for number, start in enumerate(starts):
                    self.store.set(f"{name}/{number}", text[start : start + _PIECE])
                self.pieces[key], text = len(starts), f"/{len(starts)}"
            self.store.set(name, text)

    def write_verdict(self, verdict: Any) -> None:
        """For the first rank: what it has decided for all."""
        self.write(f"{self.count}/verdict", verdict)
        self.judged = self.count
        _await_at_exit()
        judged[self.key] = self

    def forget(self, *keys: str) -> None:
        """Remove what nobody will read again, so that the store does not grow."""
        with asking():
            for key in keys:
                self.store.delete_key(f"{self.prefix}/{key}")
                for number in range(self.pieces.pop(key, 0)):
                    self.store.delete_key(f"{self.prefix}/{key}/{number}")

    def has_lost(self, rank: int) -> bool:
        """Whether the process of a rank is known to have ended."""
        if rank not in self.processes:
            if (identity := self.read(f"process/{rank}")) is None:
                return False
            self.processes[rank] = identity
        return has_ended(self.processes[rank])


_lines: dict[Key, Line] = {}
judged: dict[Key, Line] = {}
"""The sequences in which this process, rank 0, has written verdicts."""
kept: list[Callable[[], bool]] = []
"""For what else the store is to be kept: whether all have read it."""


@contextmanager
def asking() -> Iterator[None]:
    """Use the store: raises if it is known to have ended, and torch prints nothing if it ends meanwhile."""
    if host_has_ended():
        raise LostRankError("Rank 0, which hosts the store, has ended; see its output.")
    with _torch.warnings_of_c10_off():
        yield


def wakes(store: Store) -> bool:
    """Whether a store's `wait` ends as soon as the keys are written: a `FileStore` looks every 10 ms."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return isinstance(store, TCPStore)


def keep_store(until: Callable[[], bool]) -> None:
    """Have the process that hosts the store wait at its end, a few seconds at most."""
    _await_at_exit()
    kept.append(until)


def _await_at_exit() -> None:
    if not judged and not kept:
        atexit.register(await_readers)
        os.register_at_fork(after_in_child=_forget_all)  # a copy does not use the store


def _forget_all() -> None:
    judged.clear()
    kept.clear()


def line_of(key: Key) -> Line:
    """The sequence for these ranks over the current store.

    A new process group starts a new one; a current one survives another thread's destroying the group.
    """
    line = _lines.get(key)
    if line is not None and not dist.is_initialized():
        return line
    store = _torch.get_default_store()
    if line is None or line.store is not store:
        name, ranks = key
        base = f"composer_dist/{name}{ranks[0]}-{len(ranks)}-{hash(ranks)}"
        with asking():
            generation = store.add(f"{base}/generation/{dist.get_rank()}", 1)
        line = _lines[key] = Line(store, f"{base}/{generation}", key)
        line.write(f"process/{dist.get_rank()}", identify())
    return line


def forget(key: Key) -> None:
    """Start a new sequence for these ranks with their next agreement."""
    _lines.pop(key, None)


def await_readers() -> None:
    """Wait, for a few seconds at most, until the other ranks have read what rank 0 has decided.

    It is called before rank 0 ends: if it hosts the store, the store ends with it.
    """
    unread = [(line, rank) for (_, ranks), line in judged.items() for rank in ranks if rank]
    waiting = kept.copy()
    _forget_all()
    atexit.unregister(await_readers)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return
    with suppress(RuntimeError):  # the store has ended already
        for _ in poll(MARGIN, lambda: "the other ranks"):
            unread = [
                (line, rank)
                for line, rank in unread
                if (line.read(f"seen/{rank}") or 0) < line.judged and not line.has_lost(rank)
            ]
            waiting = [until for until in waiting if not until()]
            if not unread and not waiting:
                return
