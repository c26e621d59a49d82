"""Several processes on this machine, started and watched by torch's elastic agent."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def launch_local(processes: int, command: Sequence[str]) -> int:
    """Runs `python command...` as `processes` ranks of one world; when one ends badly the others are ended.

    Rank 0 has this terminal. What the others print goes to files, of which the first to fail is shown.

    Returns:
        The exit status: 0, that of the first process to fail, or 128 and the signal's number.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from composer_dist.distributed.process_group import share_cpus

    share_cpus(processes)  # inherited
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what it logs is told below
    with tempfile.TemporaryDirectory(prefix="composer-dist-") as folder:
        others = dict.fromkeys(range(1, processes), Std.ALL)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            monitor_interval=0.1,
            start_method="spawn",
            logs_specs=DefaultLogsSpecs(log_dir=folder, redirects=others or Std.NONE),
        )
        try:
            elastic_launch(config, sys.executable)(*command)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            print(_told(rank, failure, Path(folder)), file=sys.stderr, flush=True)
            return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
        except SignalException as error:
            return 128 + error.sigval
    return 0


def report_failure(text: str) -> None:
    """Tells the agent that started this process why it failed; without one, prints it."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        Path(file).write_text(json.dumps({"message": text, "timestamp": str(int(time.time()))}))
    else:
        print(text, file=sys.stderr, flush=True)


def _told(rank: int, failure: Any, folder: Path) -> str:
    """What the first process to fail has to say."""
    if "message" in failure.error_file_data and Path(failure.error_file).is_file():
        return str(failure.message)
    how = f"exit status {failure.exitcode}"
    if failure.exitcode < 0:
        how = f"killed by {signal.Signals(-failure.exitcode).name}"
    printed = [file.read_text(errors="replace") for file in sorted(folder.rglob(f"{rank}/stderr.log"))]
    return "".join(printed) + f"composer-dist: rank {rank} failed first ({how}); the others were ended."
