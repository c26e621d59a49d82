"""Whether another process of this host still runs, to tell a dead rank from a slow one.

A process is identified by its host's boot, its pid namespace, its pid and its start time (man 5 proc),
because a pid may be reused, or be another process's in another container. Nothing is known about processes on
other hosts, or without /proc.
"""

import os
from functools import cache
from pathlib import Path
from typing import Literal

Identity = list[str]
_EXITING = 4
"""PF_EXITING of linux/sched.h: set before the connections of a process close, and it is a zombie after."""


def identify() -> Identity | None:
    """This process, for others to watch; None without /proc."""
    here = _here()
    state = _state(os.getpid())
    return [*here, str(os.getpid()), state[1]] if here and state else None


def state_of(identity: Identity | None) -> Literal["runs", "stopped", "ended"] | None:
    """Whether a process runs or sleeps, is stopped by a signal or a debugger, or has ended; None: unknown."""
    if identity is None or identity[:2] != _here():
        return None
    state = _state(int(identity[2]))
    if state is None or state[1] != identity[3] or state[0] in "ZX" or state[2]:
        return "ended"
    return "stopped" if state[0] in "Tt" else "runs"


def has_ended(identity: Identity | None) -> bool:
    """Whether the process is known to have ended; False if that cannot be known."""
    return state_of(identity) == "ended"


@cache
def _here() -> Identity | None:
    """This host's boot and this process's pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return [boot, os.readlink("/proc/self/ns/pid")]
    except OSError:
        return None


def _state(pid: int) -> tuple[str, str, bool] | None:
    """State letter and start time of a process, and whether it ends; None if there is none, or no /proc."""
    try:
        # The name in parentheses may hold anything; fields 3, 9 and 22 of the line follow it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], fields[19], bool(int(fields[6]) & _EXITING)
