"""Several processes of one program on this machine: from a script, a notebook or a test.

Jobs are better started from outside, by torchrun or `composer-dist train -n`. Here a function asks for
them itself: each process calls it as one rank of a world, and what rank 0 returns comes back.
"""

import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import current_process
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in its __all__
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from composer_dist._torch import clear_dtensor_caches
from composer_dist.distributed.ranks import process_group
from composer_dist.distributed.ranks.cpus import share_cpus
from composer_dist.errors import ParallelismRuntimeError, ParallelismValueError

T = TypeVar("T")
METHODS = ("spawn", "fork")
_HOST = "127.0.0.1"


def launch(
    fn: Callable[..., T],
    n: int,
    method: str | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> T:
    """Call `fn(*args, **kwargs)` in `n` processes, the ranks of one world, and return what rank 0 does.

    Each finds the variables that torchrun would set; `process_group.init()` does the rest.

    Args:
        fn: with "spawn", at the top level of a module that can be imported.
        n: how many processes.
        method: "spawn" (fresh interpreters, which share the CPU's threads unless OMP_NUM_THREADS is set) or
            "fork" (copies of this process, with one CPU thread each: what works in a notebook, before an
            accelerator is in use). None takes "fork" in a notebook or an interactive session, else "spawn".

    Raises:
        ParallelismValueError: another method, a number below one, a function that cannot be sent.
        ParallelismRuntimeError: a launcher has started this process; a process died; a script without
            `if __name__ == "__main__":` is imported by its own child processes.
        Exception: what `fn` raised, in whichever process first; the others are terminated.
    """
    if method is None:
        method = "fork" if hasattr(sys, "ps1") or "ipykernel" in sys.modules else "spawn"
    if method not in METHODS:
        raise ParallelismValueError(f"method must be one of {', '.join(METHODS)}, not {method!r}.")
    if n < 1:
        raise ParallelismValueError(f"At least one process is needed, not {n}.")
    if getattr(current_process(), "_inheriting", False):
        raise ParallelismRuntimeError(
            "launch() was called while this process was being started: put the call, and what leads to it, "
            'under `if __name__ == "__main__":`.'
        )
    if process_group.is_distributed():
        raise ParallelismRuntimeError(
            f"A launcher has started this process already, as rank {os.environ['RANK']} of "
            f"{os.environ['WORLD_SIZE']} (LOCAL_RANK={os.environ.get('LOCAL_RANK', 'not set')}); call the "
            "function itself."
        )
    if method == "fork" and torch.accelerator.is_available() and torch.cuda.is_initialized():
        raise ParallelismRuntimeError(
            "This process already uses the accelerator, so copies of it could not use it: launch first, or "
            'pass method="spawn".'
        )
    if method == "fork":
        clear_dtensor_caches()  # they hold groups; a copy of a group has no threads, and freeing it hangs
    # Held here, so that no other process takes its port.
    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    call = partial(fn, *args, **kwargs or {})
    with tempfile.TemporaryDirectory(prefix="composer_dist-") as folder:
        box = Path(folder)  # values and errors travel in files, which do not fill up as pipes do
        try:
            start_processes(_work, (call, n, method, store.port, box), nprocs=n, start_method=method)
        except (ProcessRaisedException, ProcessExitedException) as error:
            raise _first_failure(box, error, method) from None
        except (AttributeError, pickle.PicklingError) as error:
            raise ParallelismValueError(
                f"Method {method!r} cannot send the function and its arguments: {error}. Define it at the "
                'top level of a module, or use method="fork".'
            ) from error
        value: T = pickle.loads((box / "value").read_bytes())
        return value


def _work(rank: int, call: Callable[[], Any], n: int, method: str, port: int, box: Path) -> None:
    """One process; started by torch."""
    (box / f"began-{rank}").touch()
    os.environ.update(_variables(rank, n, port))
    if method == "fork":
        # The threads of OpenMP's pool have no copies, so an operation that waited for them would hang; so
        # do workers of torch's DataLoader.
        torch.set_num_threads(1)
    else:
        share_cpus(n)
    try:
        value = call()
        if rank == 0:
            (box / "value").write_bytes(pickle.dumps(value))
    except Exception as error:
        with suppress(Exception):  # torch passes on the text of one that cannot be sent
            error.add_note(f"Raised on rank {rank}:\n{traceback.format_exc()}")
            pickle.loads(pickle.dumps(error))
            (box / f"part-{rank}").write_bytes(pickle.dumps(error))
            (box / f"part-{rank}").rename(box / f"error-{rank}")
        raise
    finally:
        process_group.destroy()  # after the error is written: the peers notice


def _first_failure(box: Path, seen: Exception, method: str) -> Exception:
    """The error of the process that failed first, which need not be the one that torch saw first."""
    if errors := sorted(box.glob("error-*"), key=lambda file: file.stat().st_mtime_ns):
        error: Exception = pickle.loads(errors[0].read_bytes())
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


def _variables(rank: int, n: int, port: int) -> dict[str, str]:
    """What torchrun would set; the store is held by the process that launches."""
    return {
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
