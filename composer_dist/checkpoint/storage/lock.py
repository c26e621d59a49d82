"""Keeps two runs out of one folder.

The process that writes to a folder holds flock(2) on `.lock` in it. The kernel releases it however the
process ends, so a dead owner keeps nobody out. On storage without such locks the file itself is the lock: it
appears whole or not at all, only where there is none, and one whose owner has ended is taken over.

The file says who the owner is. It is removed in the end, and what a killed process left of it does not count.
"""

import atexit
import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from composer_dist.distributed.ranks.liveness import has_ended, identify
from composer_dist.errors import CheckpointRuntimeError, ParallelismValueError

NAME = ".lock"
PATIENCE = 2.0
"""Seconds that an owner gets that is about to end, such as one that frees much memory."""


class FolderLock:
    """Keeps other processes out of a folder, from `take` to `release` or to the end of this process.

    Several locks of one process may be on one folder: it is released with the last of them.

    Args:
        folder: an existing folder.
        option: what errors call it, with its value.
        another: what an error offers in its place.
    """

    def __init__(self, folder: str | os.PathLike[str], option: str, another: str) -> None:
        self._folder, self._option, self._another = folder, option, another
        self._taken: _Owned | None = None

    def take(self) -> None:
        """Take the lock, unless this object has it.

        Raises:
            ParallelismValueError: another process has it.
            OSError: the folder cannot be written.
        """
        if self._taken is not None and self._taken.users:
            return
        path = Path(os.path.realpath(self._folder)) / NAME
        owned = _owned.get(path)
        if owned is None:
            owned = _owned[path] = self._acquired(path)
        owned.users += 1
        self._taken = owned

    def check(self) -> None:
        """See that the folder is still the one that was locked; one that was removed is made anew.

        Raises:
            CheckpointRuntimeError: its disk is gone, and what is there now is another one; or it cannot be
                made.
        """
        owned = self._taken
        if owned is None or not owned.users or owned.is_there():
            return
        folder = owned.path.parent
        try:
            if next(one for one in (folder, *folder.parents) if one.exists()).stat().st_dev != owned.device:
                raise CheckpointRuntimeError(f"The disk of {folder} is no longer mounted. Mount it again.")
            folder.mkdir(parents=True, exist_ok=True)
            again = self._acquired(owned.path)
        except OSError as error:
            raise CheckpointRuntimeError(
                f"The folder {folder} was removed, and cannot be made again: {error.strerror}."
            ) from error
        owned.close()
        owned.record, owned.descriptor = again.record, again.descriptor

    def __del__(self) -> None:
        self.release()

    def release(self) -> None:
        """Let others have the folder, if this object has it."""
        owned, self._taken = self._taken, None
        if owned is not None and owned.users:  # 0 in a process that was forked from the owner
            owned.users -= 1
            if not owned.users:
                del _owned[owned.path]
                owned.end()

    def _acquired(self, path: Path) -> "_Owned":
        until = time.monotonic() + PATIENCE
        while isinstance(owned := _acquire(path), str):
            if time.monotonic() > until:
                raise ParallelismValueError(
                    f"Another run writes to {self._option} ({_owner(_text(path))}): their checkpoints and "
                    f"metrics would mix. Wait for its end, or end it, or choose {self._another}.{owned}"
                )
            time.sleep(0.05)
        return owned


@dataclass
class _Owned:
    """A lock that this process has."""

    path: Path
    device: int
    record: str
    descriptor: int | None
    """None: the storage has no locks, and the file is the lock."""
    users: int = field(default=0)

    def is_there(self) -> bool:
        """Whether the locked file is still in its folder; what is in it does not matter to flock."""
        if self.descriptor is None:
            return _text(self.path) == self.record
        with suppress(OSError):
            return _is_at(self.descriptor, self.path)
        return False

    def end(self) -> None:
        """Remove the file while it is locked, so that nobody locks one that is about to go."""
        with suppress(OSError):
            if self.descriptor is not None or _text(self.path) == self.record:
                self.path.unlink()
        self.close()

    def close(self) -> None:
        """Give up the descriptor: in a child, one that it inherited holds the lock beyond the owner's end."""
        if self.descriptor is not None:
            os.close(self.descriptor)


_owned: dict[Path, _Owned] = {}


def _acquire(path: Path) -> _Owned | str:
    """The lock; if another process has it, what else there is to say of that."""
    here = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
    record = json.dumps({**here, "identity": identify(), "token": secrets.token_hex(4)})
    device = path.parent.stat().st_dev
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, path):
                os.truncate(descriptor, 0)
                with suppress(OSError):  # a full disk: the lock holds without its owner's name
                    os.pwrite(descriptor, record.encode(), 0)
                return _Owned(path, device, record, descriptor)
        except BlockingIOError:
            os.close(descriptor)
            return ""
        except OSError:
            os.close(descriptor)
            if _put(record, path):
                return _Owned(path, device, record, None)
            return f" The storage has no locks: if that process has ended, on another host, remove {path}."
        os.close(descriptor)  # its owner removed it after it was opened


def _is_at(descriptor: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    return False


def _put(record: str, path: Path) -> bool:
    """Make the file with the record, in one step; False if there is one whose owner may be alive."""
    aside = path.with_name(f"{NAME}.{secrets.token_hex(4)}")
    try:
        aside.write_text(record)
        if (there := _text(path)) is not None and _is_over(there):
            _take_away(path, there)
        try:
            os.link(aside, path)
        except PermissionError:  # storage without links either
            with path.open("x") as file:
                file.write(record)
        return True
    except FileExistsError:
        return False
    finally:
        aside.unlink(missing_ok=True)


def _take_away(path: Path, record: str) -> None:
    """Remove the file with this record, and none that another process has put there meanwhile."""
    aside = path.with_name(f"{NAME}.{secrets.token_hex(4)}")
    with suppress(FileNotFoundError):
        path.rename(aside)
        if _text(aside) != record:
            with suppress(FileExistsError):
                os.link(aside, path)
        aside.unlink()


def _is_over(record: str) -> bool:
    """Whether the owner has ended; a file without one was only opened."""
    try:
        return not record or has_ended(json.loads(record)["identity"])
    except (ValueError, KeyError, TypeError):
        return False


def _text(path: Path) -> str | None:
    with suppress(OSError):
        return path.read_text(errors="replace")
    return None


def _owner(record: str | None) -> str:
    """Who has the lock, in words."""
    try:
        found = json.loads(record or "")
        return f"process {found['pid']} on {found['host']}, since {found['since']}"
    except (ValueError, KeyError, TypeError):
        return "a process that left no name"


def _for_each(do: Callable[[_Owned], None]) -> None:
    while _owned:
        owned = _owned.popitem()[1]
        owned.users = 0
        do(owned)


os.register_at_fork(after_in_child=lambda: _for_each(_Owned.close))
atexit.register(_for_each, _Owned.end)
