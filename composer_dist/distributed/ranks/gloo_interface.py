"""The network interface by which the ranks reach each other.

Gloo listens on, and gives its peers, the address to which the machine's own name resolves. On many machines
this is 127.0.0.1 or 127.0.1.1, which other hosts cannot reach, so the ranks hang. NCCL finds the interface
itself. If all ranks are on one host, both use the loopback interface, which no other host can reach.
"""

import ipaddress
import socket
import struct
import sys
from collections.abc import Mapping
from contextlib import suppress

from composer_dist.distributed.ranks.loopback import HOST, on_one_host

_ELSEWHERE = "192.0.2.1"
"""An address that no machine has (RFC 5737), on the default route."""
_SIOCGIFADDR = 0x8915  # netdevice(7)


def gloo_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The interfaces to use where the user has named none; an earlier run on one host may have.

    They are loopback if all ranks are on one host. For several hosts `GLOO_SOCKET_IFNAME` is needed if this
    one's name resolves to loopback.
    """
    loopback = _interface_of(HOST)
    if on_one_host(environ):
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if loopback is not None else ()
        return {name: str(loopback) for name in names if name not in environ}
    known = environ.get("GLOO_SOCKET_IFNAME", loopback) != loopback
    if known or not _leads_back(socket.gethostname()):
        return {}
    for host in (environ.get("MASTER_ADDR", ""), _ELSEWHERE):
        if (address := _address_towards(host)) is not None and (name := _interface_of(address)) is not None:
            return {"GLOO_SOCKET_IFNAME": name}
    return {}


def _leads_back(host: str) -> bool:
    """Whether a name resolves to the machine that looks it up, or does not resolve."""
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET)
    except OSError:
        return True
    return ipaddress.ip_address(found[0][4][0]).is_loopback


def _address_towards(host: str) -> str | None:
    """This machine's own address on the route to `host`; None without a route."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing: the kernel chooses a route
        address: str = probe.getsockname()[0]
        return None if ipaddress.ip_address(address).is_loopback else address
    return None


def _interface_of(address: str) -> str | None:
    if sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # one without an address
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None
