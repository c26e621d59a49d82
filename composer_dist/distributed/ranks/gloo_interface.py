"""The network interface by which gloo reaches other hosts.

Gloo gives its peers the address to which the machine's own name resolves. On many machines this is 127.0.0.1
or 127.0.1.1, which other hosts cannot reach, so the ranks hang. NCCL finds the interface itself.
"""

import ipaddress
import socket
import struct
import sys
from collections.abc import Mapping
from contextlib import suppress

from composer_dist.config.mesh import per_host

_ELSEWHERE = "192.0.2.1"
"""An address that no machine has (RFC 5737), on the default route."""
_SIOCGIFADDR = 0x8915  # netdevice(7)


def gloo_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """`GLOO_SOCKET_IFNAME`, if there are several hosts and this one's name resolves to loopback."""
    world = int(environ.get("WORLD_SIZE") or 1)
    one_host = int(per_host(environ) or 1) >= world
    if "GLOO_SOCKET_IFNAME" in environ or one_host or not _leads_back(socket.gethostname()):
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
