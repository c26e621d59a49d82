"""Several processes of one program on this machine: from a script, a notebook or a test.

Jobs are better started from outside, by torchrun or `composer-dist train -n`. Here a function asks for
them itself: each process calls it as one rank of a world, and what rank 0 returns comes back.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import current_process
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in its __all__
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from composer_dist.distributed.ranks import process_group
from composer_dist.distributed.ranks.launcher import share_cpus
from composer_dist.errors import ParallelismRuntimeError, ParallelismValueError

T = TypeVar("T")


METHODS = ("spawn", "fork", "forkserver", "popen")


_HOST = "127.0.0.1"


_CHILD = "COMPOSER_DIST_LAUNCHED"
"""Set in copies of a script, which join the world of the first at its `launch`."""


_GRACE = 10.0
"""Seconds that the others get to end after one has failed."""


def launch(
    fn: Callable[..., T],
    n: int,
    method: str | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> T:
    """Call `fn(*args, **kwargs)` in `n` processes, the ranks of one world, and return what rank 0 does.

    Each finds the variables that torchrun would set; `process_group.init()` does the rest. CPU threads are
    shared out among them unless OMP_NUM_THREADS is set.

    Args:
        fn: with "spawn" and "forkserver", at the top level of a module that can be imported.
        n: how many processes.
        method: "spawn" (fresh interpreters), "forkserver", "fork" (copies of this process: what works in a
            notebook, before an accelerator is in use), or "popen" (this script is run again n - 1 times,
            up to the same call, where those processes end). None takes "fork" in a notebook or an
            interactive session, else "spawn".

    Raises:
        ParallelismValueError: another method, a number below one, a function that cannot be sent.
        ParallelismRuntimeError: a process of a launcher's calls it; a process died; a script without
            `if __name__ == "__main__":` is imported by its own children.
        Exception: what `fn` raised, in whichever process first; the others are ended.
    """
    if method is None:
        method = "fork" if hasattr(sys, "ps1") or "ipykernel" in sys.modules else "spawn"
    if method not in METHODS:
        raise ParallelismValueError(f"method is one of {', '.join(METHODS)}, not {method!r}.")
    if n < 1:
        raise ParallelismValueError(f"At least one process is needed, not {n}.")
    if getattr(current_process(), "_inheriting", False):
        raise ParallelismRuntimeError(
            "launch() was called while this process was being started: put the call, and what leads to it, "
            'under `if __name__ == "__main__":`.'
        )
    call = _Call(fn, tuple(args), dict(kwargs or {}))
    if method == "popen" and os.environ.get(_CHILD) == str(n):
        call()
        process_group.destroy()
        raise SystemExit(0)
    if process_group.is_distributed():
        raise ParallelismRuntimeError(
            f"This process is rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} already, started by a "
            f"launcher (LOCAL_RANK={os.environ.get('LOCAL_RANK', 'not set')}); call the function itself."
        )
    if method == "fork" and torch.accelerator.is_available() and torch.cuda.is_initialized():
        raise ParallelismRuntimeError(
            "This process uses the accelerator already, which its copies could not: launch first, or "
            'pass method="spawn".'
        )
    # Held here, so that its port is nobody else's from the start.
    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    result: T = (_popen if method == "popen" else _start)(call, n, store.port, method)
    return result


class _Call:
    """What every rank does."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.fn, self.args, self.kwargs = fn, args, kwargs

    def __call__(self) -> Any:
        return self.fn(*self.args, **self.kwargs)


def _start(call: _Call, n: int, port: int, method: str) -> Any:
    """With torch's multiprocessing; values and errors travel in files, which do not fill up as pipes do."""
    with tempfile.TemporaryDirectory(prefix="composer_dist-") as folder:
        box = Path(folder)
        try:
            start_processes(_work, (call, n, port, box), nprocs=n, start_method=method)
        except (ProcessRaisedException, ProcessExitedException) as error:
            raise _first_failure(box, error, method) from None
        except (AttributeError, pickle.PicklingError) as error:
            raise ParallelismValueError(
                f"Method {method!r} cannot send what it is to call: {error}. Define it at the top level of a "
                'module, or use method="fork".'
            ) from error
        return pickle.loads((box / "value").read_bytes())


def _work(rank: int, call: _Call, n: int, port: int, box: Path) -> None:
    """One process; started by torch."""
    (box / f"began-{rank}").touch()
    os.environ.update(_variables(rank, n, port))
    if "OMP_NUM_THREADS" not in os.environ:
        share_cpus(n)
    try:
        value = call()
        if rank == 0:
            (box / "value").write_bytes(pickle.dumps(value))
    except Exception as error:
        with suppress(Exception):  # one that cannot be sent is told as text, by torch
            error.add_note(f"Raised on rank {rank}:\n{traceback.format_exc()}")
            pickle.loads(pickle.dumps(error))
            (box / f"part-{rank}").write_bytes(pickle.dumps(error))
            (box / f"part-{rank}").rename(box / f"error-{rank}")
        raise
    finally:
        process_group.destroy()  # after the error is told: the peers notice


def _first_failure(box: Path, seen: Exception, method: str) -> Exception:
    """The error of the process that failed first, which need not be the one that torch saw first."""
    if errors := sorted(box.glob("error-*"), key=lambda file: file.stat().st_mtime_ns):
        error: Exception = pickle.loads(errors[0].read_bytes())
        return error
    if isinstance(seen, ProcessExitedException):
        how = f"Rank {seen.error_index} ended with {seen.signal_name or f'exit status {seen.exit_code}'}"
        if not (box / f"began-{seen.error_index}").exists() and method != "fork":
            return ParallelismRuntimeError(
                f"{how} before it could begin; what it printed tells why. A script that calls launch() with "
                f'method={method!r} is imported by its processes: guard it with `if __name__ == "__main__":`.'
            )
        return ParallelismRuntimeError(f"{how}; the others were ended.")
    return ParallelismRuntimeError(str(seen))


def _popen(call: _Call, n: int, port: int, method: str) -> Any:
    """This process is rank 0; the others run the same script from its beginning."""
    if not sys.argv[0] or not Path(sys.argv[0]).is_file():
        raise ParallelismValueError("Method 'popen' runs a script again, but this process runs none.")
    others = {
        rank: subprocess.Popen(
            [sys.executable, *sys.argv],
            env={**os.environ, **_variables(rank, n, port), _CHILD: str(n)},
        )
        for rank in range(1, n)
    }
    try:
        with _environment(_variables(0, n, port)):
            try:
                value = call()
            finally:
                process_group.destroy()
        for rank, process in others.items():
            if status := process.wait():
                raise ParallelismRuntimeError(f"Rank {rank} ended with status {status}.")
        return value
    finally:
        for process in others.values():
            process.terminate()
        for process in others.values():
            try:
                process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                process.kill()


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


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
