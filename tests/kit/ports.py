"""Ports for stores that a test's processes open by themselves."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from composer_dist.distributed.ranks.loopback import HOST


@contextmanager
def reserved_port() -> Iterator[int]:
    """Inside, a port that a store may use, and that the kernel gives to nobody who asks for any port.

    A port that was only found to be free could go to a test that runs at the same time. A socket that is
    bound, but does not listen, keeps it; both it and the store's have SO_REUSEADDR.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((HOST, 0))
        yield holder.getsockname()[1]
