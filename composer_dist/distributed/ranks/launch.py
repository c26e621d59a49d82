"""Starts several processes of one program on this machine, from a script, a notebook or a test.

Prefer torchrun or `composer-dist train -n` for jobs.
"""

import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import current_process, resource_tracker
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from composer_dist._torch import clear_dtensor_caches
from composer_dist.distributed.ranks import process_group
from composer_dist.distributed.ranks.cpus import share_cpus
from composer_dist.distributed.ranks.launcher_variables import check_alone
from composer_dist.distributed.ranks.loopback import HOST, host_store
from composer_dist.distributed.ranks.reports import reason_of_loss
from composer_dist.errors import ParallelismRuntimeError, ParallelismValueError

T = TypeVar("T")
METHODS = ("spawn", "fork")


def launch(
    fn: Callable[..., T],
    n: int,
    method: str | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> T:
    """Call `fn(*args, **kwargs)` in `n` processes, the ranks of one world, and return rank 0's result.

    The processes have torchrun's variables, from which `process_group.init()` makes the process group.

    Args:
        fn: with "spawn", at the top level of a module that can be imported.
        n: number of processes.
        method: "spawn" (new interpreters, which share the CPU's threads unless OMP_NUM_THREADS is set) or
            "fork" (copies of this process with one CPU thread each, which works in a notebook before it uses
            an accelerator). None takes "fork" in a notebook or an interactive session, else "spawn".

    Raises:
        ParallelismValueError: an unknown method, `n` below one, or a function that cannot be sent.
        ParallelismRuntimeError: a launcher has started this process, a process died, or the script lacks
            `if __name__ == "__main__":`.
        Exception: the first error that `fn` raised; the other processes are terminated.
    """
    if method is None:
        method = "fork" if hasattr(sys, "ps1") or "ipykernel" in sys.modules else "spawn"
    if method not in METHODS:
        raise ParallelismValueError(f"method must be one of {', '.join(METHODS)}, not {method!r}.")
    if n < 1:
        raise ParallelismValueError(f"At least one process is needed, not {n}.")
    if getattr(current_process(), "_inheriting", False):
        raise ParallelismRuntimeError(
            'launch() was called while this process was starting: call it under `if __name__ == "__main__":`.'
        )
    if process_group.is_distributed():
        raise ParallelismRuntimeError(
            f"A launcher has started this process already, as rank {os.environ['RANK']} of "
            f"{os.environ['WORLD_SIZE']} (LOCAL_RANK={os.environ.get('LOCAL_RANK', 'not set')}); call the "
            "function directly."
        )
    check_alone(os.environ)
    if method == "fork" and torch.accelerator.is_available() and torch.cuda.is_initialized():
        raise ParallelismRuntimeError(
            "This process already uses the accelerator, so its copies could not: launch first, or pass "
            'method="spawn".'
        )
    if method == "fork":
        clear_dtensor_caches()  # they hold groups; a copy of a group has no threads, and freeing it hangs
    # The store stays in this process, so that no other process can take its port.
    store = host_store()
    call = partial(fn, *args, **kwargs or {})
    with tempfile.TemporaryDirectory(prefix="composer_dist-") as folder:
        box = Path(folder)  # for values and errors: unlike pipes, files do not fill up
        try:
            _run_all((call, n, method, store.port, box), n, method)
        except (ProcessRaisedException, ProcessExitedException) as error:
            raise _first_failure(box, error, method) from None
        except (AttributeError, pickle.PicklingError) as error:
            raise ParallelismValueError(
                f"Method {method!r} cannot send the function and its arguments: {error}. Define it at the "
                'top level of a module, or use method="fork".'
            ) from error
        value: T = pickle.loads((box / "value").read_bytes())  # noqa: S301  # nosec B301: rank 0 wrote it
        return value


def _run_all(args: tuple[Any, ...], n: int, method: str) -> None:
    """Start the processes, which notice Ctrl-C once they work: their imports would print a traceback."""
    resource_tracker.ensure_running()  # its start would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        context = start_processes(_work, args, nprocs=n, join=False, start_method=method)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    while not context.join():
        pass


def _work(rank: int, call: Callable[[], Any], n: int, method: str, port: int, box: Path) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    (box / f"began-{rank}").touch()
    os.environ.update(dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)))
    os.environ.update(dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(n)))
    os.environ.update(MASTER_ADDR=HOST, MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    if method == "fork":
        # A copy has no threads of OpenMP's pool and would hang waiting for them, as in DataLoader's workers.
        torch.set_num_threads(1)
    else:
        share_cpus(n)
    try:
        value = call()
        if rank == 0:
            (box / "value").write_bytes(pickle.dumps(value))
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        with suppress(Exception):  # torch sends the text of an error that cannot be pickled
            where = "" if hasattr(error, "__notes__") else f"This was rank {rank}."
            error.add_note(f"Raised on rank {rank}:\n{traceback.format_exc()}{where}")
            if dist.is_initialized() and (reason := reason_of_loss(error, "a collective")):
                error.add_note(str(reason))
            pickle.loads(pickle.dumps(error))  # noqa: S301  # nosec B301
            (box / f"part-{rank}").write_bytes(pickle.dumps(error))
            (box / f"part-{rank}").rename(box / f"error-{rank}")
        raise
    finally:
        process_group.destroy()  # after the error is written: the peers notice


def _first_failure(box: Path, seen: Exception, method: str) -> BaseException:
    """The error of the process that failed first; torch may have seen another one first."""
    if errors := sorted(box.glob("error-*"), key=lambda file: file.stat().st_mtime_ns):
        error: BaseException = pickle.loads(errors[0].read_bytes())  # noqa: S301  # nosec B301: a rank wrote it
        return error
    if isinstance(seen, ProcessExitedException):
        how = f"Rank {seen.error_index} ended with {seen.signal_name or f'exit status {seen.exit_code}'}"
        if not (box / f"began-{seen.error_index}").exists() and method != "fork":
            return ParallelismRuntimeError(
                f"{how} before it could start; see its output. A script that calls launch() with "
                f'method={method!r} is imported by its processes: guard it with `if __name__ == "__main__":`.'
            )
        return ParallelismRuntimeError(f"{how}; the others were terminated.")
    return ParallelismRuntimeError(str(seen))
