"""Worlds of processes that are forked from one that has the imports done, and what they leave behind.

Each world has a process of its own, in which it is measured. That process is the one to which the ranks'
orphans fall (man 2 PR_SET_CHILD_SUBREAPER), and it has its own /dev/shm and its own small disk, where the
kernel lets it. A rank runs `body` outside of everything that this process was doing, and ends as a script
does (its threads, then what is registered with atexit), but for the teardown of modules, which takes longer
than all the rest: `main` has to be called as `as_script(main)`. Ranks are killed when the process that has
forked them ends, however it does.
"""

import atexit
import ctypes
import os
import pickle
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil

from tests.kit.ports import reserved_port

T = TypeVar("T")
Body = Callable[[Path], object]
"""What a rank runs, with the folder of its world."""
DISK = "8m"
"""Of a world, at `folder / "disk"`."""
_OTHERS = ("pymp-", "torchinductor_")
"""Temporary folders that torch's DataLoader leaves in healthy runs too, and a cache of its compiler."""
_ORPHANS = 10.0
"""Seconds in which what a rank has started has to end after it."""
_CLONE_NEWNS, _CLONE_NEWUSER, _PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1 << 17, 1 << 28, 1, 36
_MS_BIND, _MS_REC, _MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18
"""Of linux/sched.h, linux/prctl.h and linux/mount.h."""


@dataclass
class Ended:
    """How a rank has ended."""

    status: int | None
    """None if it had to be killed; -n for signal n."""
    seconds: float
    """Since the start of the world."""
    text: str
    """What it has printed."""


@dataclass
class Outcome:
    """How a world has ended."""

    ranks: list[Ended] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """What has stayed: processes, segments of shared memory, temporary files, and what `look` has found."""
    seconds: float = 0.0
    cpu: float = 0.0
    """Seconds of CPU, of all of its processes."""
    isolated: bool = True
    """Whether it had its own /dev/shm and disk."""


class _RankError(BaseException):
    """Unwinds the process of a rank, which then runs its body."""

    def __init__(self, body: Callable[[], object]) -> None:
        self.body = body


def as_script(main: Callable[[], object]) -> None:
    """Call `main`, which calls `outcomes`; and in the processes of ranks what they have to do."""
    try:
        main()
    except _RankError as rank:
        body = rank.body
    else:
        return
    status = 0
    try:
        body()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def outcomes(
    worlds: Iterable[tuple[T, Body, int]], look: Callable[[Path], list[str]], limit: float, at_once: int = 1
) -> Iterator[tuple[T, Outcome]]:
    """Run worlds, each with a name, a body and a number of ranks; yields in the order of their ends.

    Args:
        look: finds what has stayed in a folder, once all ranks have ended.
        limit: seconds in which they have to end.
        at_once: worlds.
    """
    running: dict[int, tuple[T, Path]] = {}
    waiting = iter(worlds)
    while True:
        while len(running) < at_once and (one := next(waiting, None)):
            name, body, ranks = one
            folder, parent = Path(tempfile.mkdtemp(prefix="forked-")), os.getpid()
            if (child := os.fork()) == 0:
                try:
                    _measure(body, ranks, folder, look, limit, parent)
                except Exception:
                    traceback.print_exc()
                    os._exit(1)
            running[child] = name, folder
        if not running:
            return
        child = os.wait()[0]
        name, folder = running.pop(child)
        outcome: Outcome = pickle.loads((folder / "outcome").read_bytes())
        shutil.rmtree(folder)
        yield name, outcome


def see_another(source: Path, target: Path) -> None:
    """From now on this process alone sees the source in place of the target."""
    libc = ctypes.CDLL(None, use_errno=True)
    places = os.fspath(source).encode(), os.fspath(target).encode()
    if libc.unshare(_CLONE_NEWNS) or libc.mount(*places, None, _MS_BIND, None):
        raise OSError(ctypes.get_errno(), "cannot see another file")


def _end_with(parent: int) -> None:
    """Have this process killed when its parent ends, also if it has ended already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _measure(
    body: Body, ranks: int, folder: Path, look: Callable[[Path], list[str]], limit: float, parent: int
) -> None:
    """Run one world, write its outcome, and end."""
    began = time.monotonic()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for name in ("disk", "temporary"):
        (folder / name).mkdir()
    found = Outcome(isolated=_isolate(folder / "disk"))
    _end_with(parent)  # a new namespace of users would take that back
    with reserved_port() as port:
        pids = [_start(body, rank, ranks, folder, port) for rank in range(ranks)]
        ends = _await(pids, limit)
    found.left = _orphans()
    for rank, pid in enumerate(pids):
        status, seconds = ends.get(pid, (None, time.monotonic() - began))
        text = (folder / f"text-{rank}").read_text(errors="replace")
        found.ranks.append(Ended(status, seconds, text))
    if found.isolated:
        found.left += [f"shared memory {path.name}" for path in Path("/dev/shm").iterdir()]
    names = [path.name for path in (folder / "temporary").iterdir()]
    found.left += [f"temporary {name}" for name in names if not name.startswith(_OTHERS)]
    try:
        found.left += look(folder)
    except Exception as error:
        found.left.append(f"{type(error).__name__}: {error}")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    found.seconds, found.cpu = time.monotonic() - began, used.ru_utime + used.ru_stime
    (folder / "outcome").write_bytes(pickle.dumps(found))
    os._exit(0)


def _start(body: Body, rank: int, ranks: int, folder: Path, port: int) -> int:
    parent = os.getpid()
    if child := os.fork():
        return child
    _end_with(parent)
    os.setsid()
    text = os.open(folder / f"text-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor, target in ((os.open(os.devnull, os.O_RDONLY), 0), (text, 1), (text, 2)):
        os.dup2(descriptor, target)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TMPDIR": str(folder / "temporary")}
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
    tempfile.tempdir = os.environ["TMPDIR"]
    raise _RankError(lambda: body(folder))


def _await(pids: list[int], limit: float) -> dict[int, tuple[int | None, float]]:
    """Status and time of each rank's end; after the limit those that are left are killed."""
    began, found = time.monotonic(), dict[int, tuple[int | None, float]]()
    while len(found) < len(pids) and (waited := time.monotonic() - began) < limit:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in pids:
            found[pid] = os.waitstatus_to_exitcode(status), waited
        elif not pid:
            time.sleep(0.02)
    for pid in pids:
        if pid not in found:
            os.kill(pid, signal.SIGKILL)
    return found


def _orphans() -> list[str]:
    """The processes that ranks have started and that do not end; they are killed."""
    end = time.monotonic() + _ORPHANS
    while time.monotonic() < end:
        try:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                time.sleep(0.02)
        except ChildProcessError:
            return []
    left = psutil.Process().children(recursive=True)
    found = []
    for one in left:
        with suppress(psutil.Error):
            found.append(f"process {' '.join(one.cmdline())[:80]}")
            one.kill()
    with suppress(ChildProcessError):
        while True:
            os.wait()
    return found


def _isolate(disk: Path) -> bool:
    """Give this process a /dev/shm and a disk of its own, if the kernel lets it."""
    libc, user, group = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
    if libc.unshare(_CLONE_NEWNS):
        if libc.unshare(_CLONE_NEWNS | _CLONE_NEWUSER):
            return False
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            Path("/proc/self", name).write_text(text)
    if libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None):
        return False
    sizes = {"/dev/shm": "256m", os.fspath(disk): DISK}
    return not any(
        libc.mount(b"none", path.encode(), b"tmpfs", 0, f"size={size}".encode())
        for path, size in sizes.items()
    )
