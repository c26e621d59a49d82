"""The interface that leads to other hosts."""

import socket
import sys

import pytest

from composer_dist.distributed.ranks import gloo_interface as interface
from composer_dist.distributed.ranks.gloo_interface import gloo_variables
from tests.kit.scripts.hosts import on_two_hosts

pytestmark = pytest.mark.promise(105)

TWO_HOSTS = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node0"}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A machine whose own name is `own`; its interface by the address it has there."""
    addresses = {"own": "127.0.1.1", "node0": "10.7.0.1", "elsewhere": "8.8.8.8"}
    monkeypatch.setattr(socket, "gethostname", lambda: "own")
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest: [(0, 0, 0, "", (addresses[host], 0))])
    monkeypatch.setattr(interface, "_address_towards", {"node0": "10.7.0.2", "192.0.2.1": "192.168.1.5"}.get)
    names = {"10.7.0.2": "ib0", "192.168.1.5": "eth0", "127.0.0.1": "lo"}
    monkeypatch.setattr(interface, "_interface_of", names.get)
    return addresses


def test_gloo_takes_the_interface_that_leads_to_the_first_host(machine: dict[str, str]) -> None:
    assert gloo_variables(TWO_HOSTS) == {"GLOO_SOCKET_IFNAME": "ib0"}
    # The first host's own name leads back to itself too: then the one that leads out.
    assert gloo_variables(TWO_HOSTS | {"MASTER_ADDR": "own"}) == {"GLOO_SOCKET_IFNAME": "eth0"}


def test_gloo_is_left_alone_where_it_finds_its_way_or_needs_none(machine: dict[str, str]) -> None:
    assert gloo_variables(TWO_HOSTS | {"GLOO_SOCKET_IFNAME": "mine"}) == {}
    machine["own"] = "10.7.0.2"
    assert gloo_variables(TWO_HOSTS) == {}


@pytest.mark.parametrize(
    "environ", [{}, TWO_HOSTS | {"LOCAL_WORLD_SIZE": "4"}, TWO_HOSTS | {"MASTER_ADDR": "localhost"}]
)
def test_ranks_of_one_host_use_loopback(machine: dict[str, str], environ: dict[str, str]) -> None:
    loopback = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    assert gloo_variables(environ) == loopback
    assert gloo_variables(environ | {"GLOO_SOCKET_IFNAME": "mine"}) == {"NCCL_SOCKET_IFNAME": "lo"}
    # An earlier run on one host, in the same environment, does not break one on several.
    assert gloo_variables(TWO_HOSTS | loopback) == {"GLOO_SOCKET_IFNAME": "ib0"}


def test_the_loopback_interface_has_its_address_and_leads_nowhere() -> None:
    if sys.platform == "linux":
        assert interface._interface_of("127.0.0.1") == "lo"
    assert interface._interface_of("192.0.2.1") is None
    assert interface._address_towards("127.0.0.1") is None
    assert interface._address_towards("no such host") is None


@pytest.mark.slow
def test_two_hosts_find_the_cable_between_them() -> None:
    code = (
        "from composer_dist.distributed.ranks.gloo_interface import gloo_variables\n"
        f"print(gloo_variables({TWO_HOSTS | {'MASTER_ADDR': '10.7.0.1'}!r}))"
    )
    found = on_two_hosts(*[[sys.executable, "-c", code]] * 2)
    assert [eval(text) for text in found] == [{"GLOO_SOCKET_IFNAME": name} for name in ("va", "vb")]
