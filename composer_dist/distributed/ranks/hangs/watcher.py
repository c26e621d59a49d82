"""A process that ends a rank if none of its Python threads has run for too long.

A call in C that holds the GIL stops every thread of the rank, and SIGSTOP the whole process. This script
needs no package and is started as `python watcher.py PID DUMP`, with a pipe as its input: each line there is
the number of seconds in which the next one is due, or "kill" and the processes to kill once the rank has
ended.

Args:
    PID: the rank, which has started this process.
    DUMP: a file below /proc, in which the rank's faulthandler leaves the stacks of its threads.
"""

import os
import select
import signal
import sys
import time
from contextlib import suppress

_LOOK = 1.0
"""Seconds between looks: a process that was stopped itself has missed one at most."""
_AFTER = 1.0
"""Seconds after the end of the rank in which its launcher notices that it was the first to end."""


def main(pid: int, dump: str) -> None:
    """Watch until the rank ends, or end it."""
    limit, waited, doomed = float("inf"), 0.0, list[int]()
    while os.getppid() == pid:
        if select.select([0], [], [], _LOOK)[0]:
            told = os.read(0, 1 << 16).decode()
            if not told:
                break
            words = told.splitlines()[-1].split()
            if words[0] == "kill":
                doomed = [int(word) for word in words[1:]]
            else:
                limit, waited = float(words[0]), 0.0
            continue
        waited += _LOOK
        if waited < limit:
            continue
        stacks = ""
        with suppress(OSError), open(dump, errors="replace") as file:
            stacks = file.read()
        if os.getppid() == pid:
            text = f"process {pid} was ended: none of its Python threads has run for {waited:.0f} s"
            os.write(2, f"composer_dist: {text}.\n{stacks}".encode())
            os.kill(pid, signal.SIGKILL)
        return
    if doomed:
        time.sleep(_AFTER)
    for process in doomed:
        with suppress(OSError):
            os.kill(process, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
