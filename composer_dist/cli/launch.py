"""Several processes on this machine, started and watched by torch's elastic agent."""

import ctypes
import json
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from composer_dist.cli import interrupt

_SAVING = 600
"""Seconds that processes get after SIGTERM to save a checkpoint; the sender has a limit too."""
_CLOSING = 30
"""Seconds that processes get after Ctrl-C."""
_AFTER_OWN = 5
"""Seconds after its own failure that a rank with lines of the user's code still counts as the first."""
_SEE = re.compile(r"[;.] [Ss]ee (?:the output there|its output)\.")
_ABOVE, _NOTHING = "; its output is above.", "; it printed nothing to its log."
_PR_SET_PDEATHSIG = 1  # prctl(2)


def launch_local(processes: int, command: Sequence[str], name: str = "train") -> int:
    """Runs `python command...` as `processes` ranks of one world; when one fails the others are terminated.

    Rank 0 prints to this terminal. The others print to files; that of the first to fail is shown.
    SIGTERM and Ctrl-C are passed on to all of them. A second Ctrl-C ends this process at once, and with it
    those that have called `end_with`.

    Args:
        name: of the command that is running, for the text after Ctrl-C.

    Returns:
        The exit status: 0, that of the first process to fail, or 128 and the signal's number.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from composer_dist.cli import rendezvous
    from composer_dist.distributed.ranks.cpus import share_cpus
    from composer_dist.distributed.ranks.loopback import HOST

    rendezvous.register()
    interruption = rendezvous.Interruption()
    share_cpus(processes)  # inherited
    for part in ("", ".agent.server.api"):  # which sets its own level; the failure is printed below
        logging.getLogger(f"torch.distributed.elastic{part}").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="composer-dist-") as folder:
        others = dict.fromkeys(range(1, processes), Std.ALL)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=uuid.uuid4().hex,
            rdzv_backend=rendezvous.NAME,
            rdzv_endpoint=HOST,
            rdzv_configs={"interruption": interruption},
            max_restarts=0,
            monitor_interval=0.1,
            start_method="spawn",
            signals_to_handle="SIGTERM,SIGHUP,SIGQUIT",  # Ctrl-C is ours
            shutdown_timeout=_SAVING,
            logs_specs=DefaultLogsSpecs(log_dir=folder, redirects=others or Std.NONE),
        )
        try:
            with _interruptible(folder, name, interruption.interrupt):
                elastic_launch(config, sys.executable)(*command)
        except ChildFailedError as error:
            rank, failure = _first(error.failures)
            status, text = _told(rank, failure, Path(folder))
            print(text, file=sys.stderr, flush=True)
            return status
        except SignalException as error:
            return 128 + error.sigval
    return 0


@contextmanager
def _interruptible(folder: str, command: str, pass_on: Callable[[Exception], None]) -> Iterator[None]:
    """Inside, the agent passes the first Ctrl-C on; a second one, or a long wait, ends everything."""
    from torch.distributed.elastic.multiprocessing import SignalException

    def at_once(number: int, frame: Any) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(interrupt.EXIT_STATUS)

    def first(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, at_once)
        signal.signal(signal.SIGALRM, at_once)
        signal.alarm(_CLOSING)
        interrupt.tell(command)
        pass_on(SignalException("Ctrl-C", signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGINT, before)


def end_with(launcher: int) -> None:
    """On Linux, end this process when its launcher, a process id, ends or if it has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:
            raise SystemExit(128 + signal.SIGKILL)


def report_failure(text: str, own: bool = True, status: int | None = None) -> None:
    """Tells the agent that started this process why it failed; without one, prints it.

    Args:
        text: the message.
        status: the launcher's, if it shows this message; by default that of the rank that ended first.
        own: it has lines of the user's code; ranks that raise the same error without them come later.
    """
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        now = time.time() + (0 if own else _AFTER_OWN)
        Path(file).write_text(
            json.dumps({"message": text, "status": status, "timestamp": str(int(now)), "at": now})
        )
    else:
        print(text, file=sys.stderr, flush=True)


def _first(failures: Mapping[int, Any]) -> tuple[int, Any]:
    """The rank that failed first, and how: torch's agent counts whole seconds, and others fail soon after."""
    ended = (-signal.SIGTERM, 128 + signal.SIGTERM)  # by the agent
    own = {rank: failure for rank, failure in failures.items() if failure.exitcode not in ended}
    return min((own or failures).items(), key=lambda one: one[1].error_file_data.get("at", one[1].timestamp))


def _told(rank: int, failure: Any, folder: Path) -> tuple[int, str]:
    """The exit status and the message of the first process to fail."""
    code = failure.exitcode
    status = code if code > 0 else 128 - code
    if "at" in failure.error_file_data:
        # A rank that failed before may have been ended by the agent before it could exit.
        reports = [json.loads(file.read_text()) for file in folder.rglob("error.json")]
        first = min((one for one in reports if "at" in one), key=lambda one: one["at"])
        return first["status"] or status, _with_output(first["message"], folder)
    if "message" in failure.error_file_data and Path(failure.error_file).is_file():
        return status, _recorded(failure.message, folder)
    how = f"exit status {failure.exitcode}"
    if failure.exitcode < 0:
        how = f"killed by {signal.Signals(-failure.exitcode).name}"
    printed = [file.read_text(errors="replace") for file in sorted(folder.rglob(f"{rank}/stderr.log"))]
    return status, (
        "".join(printed)
        + f"composer-dist: rank {rank} failed first ({how}); the other ranks were terminated."
    )


def _recorded(message: Any, folder: Path) -> str:
    """The message of an error that torch has recorded; of a hang only what rank 0 has not printed."""
    from composer_dist.distributed.ranks.hangs.guard import HangError

    text = str(message["message"] if isinstance(message, dict) else message)
    if text.startswith(hang := f"{HangError.__name__}: "):
        text = f"composer-dist: {text.removeprefix(hang)}"
        return text.partition("\n")[0] if [*folder.rglob("0/error.json")] else text
    return text


def _with_output(text: str, folder: Path) -> str:
    """The message; if it points to the output of ranks that reported nothing, with it, as files go away."""
    if (see := _SEE.search(text)) is None:
        return text
    files = [file for file in sorted(folder.rglob("std*.log")) if not (file.parent / "error.json").exists()]
    printed = "".join(file.read_text(errors="replace") for file in files)
    return f"{printed}{text[: see.start()]}{_ABOVE if printed else _NOTHING}{text[see.end() :]}"
