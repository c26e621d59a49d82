"""Stores that only processes of this machine can reach.

A `TCPStore` answers whoever connects to it, and by default listens on all interfaces of the machine (torch
2.13). If all ranks are on one machine, it listens on the loopback interface only.
"""

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in its __all__

from composer_dist.config.launched import launched_number, launched_ranks
from composer_dist.distributed.ranks.liveness import Identity, has_ended
from composer_dist.distributed.ranks.waiting import poll
from composer_dist.errors import ParallelismRuntimeError

HOST = "127.0.0.1"
_LIMIT = timedelta(minutes=30)
"""torch's own for a process group."""
_HERE = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
"""The variables for the number of ranks on this host."""
_hosted: dict[int, TCPStore] = {}
"""The stores in this process, by port."""
_hosts: list[Identity] = []
"""The process of another rank that hosts the store, if this one knows it."""


def on_one_host(environ: Mapping[str, str]) -> bool:
    """Whether a launcher's variables show that all ranks are on this machine."""
    address = environ.get("MASTER_ADDR", "")
    is_loopback = address in ("localhost", "::1") or address.startswith("127.")
    here = next(filter(None, (launched_number(name, environ) for name in _HERE)), 1)
    return is_loopback or here >= launched_ranks(environ)


def host_store(port: int = 0, timeout: timedelta = _LIMIT) -> TCPStore:
    """A new store on the loopback interface, in this process; port 0 means any.

    Raises:
        ParallelismRuntimeError: the port is in use.
    """
    try:
        listener = socket.create_server((HOST, port))
    except OSError as error:
        raise ParallelismRuntimeError(
            f"The store of the ranks cannot use port {port} ({os.strerror(error.errno or 0)}). Set "
            "MASTER_PORT to a free one."
        ) from error
    found: int = listener.getsockname()[1]
    store = TCPStore(
        HOST,
        found,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),
    )
    return store


def own_store(port: int, rank: int, timeout: timedelta = _LIMIT) -> TCPStore:
    """The store of ranks without a launcher's: rank 0 hosts it, for all of its process groups.

    Raises:
        ParallelismRuntimeError: the port is in use, or rank 0 does not open it in time.
    """
    from composer_dist import _torch  # not above: it takes 0.3 s, and launchers need only `host_store`

    if rank == 0:
        if port not in _hosted:
            _hosted[port] = host_store(port, timeout)
        return _hosted[port]
    for _ in poll(timeout, lambda: "rank 0, which opens the store"):  # torch would print each attempt
        with suppress(OSError), socket.create_connection((HOST, port)), _torch.warnings_of_c10_off():
            # torch reconnects if the connection is reset, but prints a C++ stack.
            return TCPStore(HOST, port, is_master=False, timeout=timeout)
    raise ParallelismRuntimeError(
        f"Rank 0 did not open the store of the ranks, port {port} of {HOST}, within "
        f"{timeout.total_seconds():g} s. Check its log, and that all ranks were started."
    )


def is_host() -> bool:
    """Whether this process hosts the store of its ranks, which ends with it."""
    return bool(_hosted)


def remember_host(identity: Identity | None) -> None:
    """Note the process that hosts the store of this rank."""
    _hosts[:] = [identity] if identity else []


def host_has_ended() -> bool:
    """Whether the process that hosts the store is known to have ended.

    The store is not used any more then: torch prints what happens to its connections (2.13).
    """
    return any(map(has_ended, _hosts))
