"""Locks a folder, says so and waits: `python -m tests.kit.scripts.locking FOLDER [without] [forks] [race]`.

Options: "without" locks of the storage; "forks" a child that outlives this process; "race" waits for a
line first. It prints "taken", or the error.
"""

import errno
import fcntl
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any
from unittest.mock import Mock

from composer_dist.checkpoint.storage.lock import FolderLock
from composer_dist.errors import ParallelismValueError

ROOT = Path(__file__).parents[3]
NO_LOCKS = Mock(side_effect=OSError(errno.ENOLCK, os.strerror(errno.ENOLCK)))


def started(folder: Path, *options: str) -> "Popen[str]":
    command = [sys.executable, "-m", "tests.kit.scripts.locking", str(folder), *options]
    return Popen(command, cwd=ROOT, stdin=PIPE, stdout=PIPE, text=True)


@contextmanager
def holding(folder: Path, *options: str) -> "Iterator[Popen[str]]":
    """A process that has the lock, until the block or the process ends."""
    with started(folder, *options) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "taken\n"
        try:
            yield process
        finally:
            process.kill()


def main(folder: str, *options: str) -> None:
    if "without" in options:
        fcntl.flock = NO_LOCKS
    lock: Any = FolderLock(folder, f"out={folder}", "another out")
    if "race" in options:
        print("ready", flush=True)
        sys.stdin.readline()
    try:
        lock.take()
    except ParallelismValueError as error:
        print(error, flush=True)
        return
    if "forks" in options:
        ready, done = os.pipe()
        if os.fork() == 0:
            os.close(1)
            lock.release()  # which is not the child's to do
            os.write(done, b".")
            time.sleep(30)
            os._exit(0)
        os.read(ready, 1)
    print("taken", flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main(*sys.argv[1:])
