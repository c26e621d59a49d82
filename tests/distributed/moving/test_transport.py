"""Weights arrive the same by memory and by messages, and the preparation reports the way taken."""

import json
import os
import shutil
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composer_dist.distributed import parallelize_model
from composer_dist.distributed.mesh.layout import Layout
from composer_dist.distributed.mesh.mesh import Mesh
from composer_dist.distributed.moving import memory as peer_memory
from composer_dist.distributed.moving import transport
from composer_dist.distributed.moving.messages import Cargo
from composer_dist.distributed.moving.transport import Transport
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.errors import ParallelismError
from tests.kit.compare import alike, fails_alike, full, same, values
from tests.kit.grids import crossed, slow
from tests.kit.measure import profiled
from tests.kit.meshes import awkward_tensors, cargoes_of, config
from tests.kit.toy import built
from tests.kit.worker import HOST
from tests.kit.world import _host_store, on_ranks

MIB = 1 << 20


@crossed({"device": ["cpu", "meta"], "ranks, replicas": [(2, 1), (4, 1), (4, 2)]})
@on_ranks("ranks")
def test_both_ways_bring_the_same(ranks: int, replicas: int, device: str) -> None:
    found = {}
    for asked, taken in (("memory", "memory"), ("messages", "messages")):
        model = built(device="cpu" if device == "cpu" and dist.get_rank() == 0 else "meta")
        torch.manual_seed(0)
        done = parallelize_model(model, config(transport=asked, replicas=replicas))
        assert done.transport == taken
        assert done.bytes_moved > 0
        found[asked] = values(model)
    same(found["memory"], found["messages"])
    assert alike(model, full)


class Odd(nn.Module):
    """A weight that is not contiguous, so that it has no plain address, beside one that is."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Parameter(torch.arange(35.0).view(5, 7))
        self.turned = nn.Parameter(torch.arange(35.0).view(5, 7).t())


@on_ranks(2)
def test_what_has_no_address_goes_by_messages() -> None:
    with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
        model = Odd()
    parallelize_model(model, config(transport="memory"))
    same(values(model), values(Odd()))


@on_ranks(2)
def test_one_rank_elsewhere_means_messages_for_all_unless_memory_was_asked_for() -> None:
    """Rank 1 cannot read rank 0's memory, as if it were on another host."""
    device = "meta" if dist.get_rank() else "cpu"
    with (
        mock.patch.object(transport, "FEW", 0),
        mock.patch.object(peer_memory, "can_read", return_value=dist.get_rank() == 0),
    ):
        assert parallelize_model(built(device=device), config()).transport == "messages"
        with fails_alike(ParallelismError, "transport='memory' was asked for, but ranks [1] cannot read"):
            parallelize_model(built(device=device), config(transport="memory"))


@on_ranks(2)
def test_reading_takes_no_memory_beyond_the_shard() -> None:
    with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
        model = nn.Linear(4096, 4096, bias=False)
    way = config(transport="memory", bucket_bytes=1 * MIB)
    assert profiled(lambda: parallelize_model(model, way)) <= 32 * MIB + 2 * MIB + 16 * MIB


def test_a_way_that_does_not_exist_is_refused() -> None:
    for way in ("pigeon", "hosts"):
        with pytest.raises(ValueError, match="transport must be one of 'auto', 'memory', 'messages', not"):
            config(transport=way)


FULL = torch.arange(7.0 * 12).view(7, 12)
WINDOWS = {"rows": (0, 1), "columns": (1, 1), "fused": (1, 3), "not cut": (None, 1)}
MESHES = ["dp_shard", "tp", "dp_replicate", "dp_replicate dp_shard", "dp_shard tp", "dp_replicate tp"]


@pytest.mark.parametrize(
    ("asked", "meshes"),
    [
        ("memory", MESHES[::2]),
        ("messages", MESHES[5:]),
        slow("messages", MESHES[1:5:2]),
        slow("memory", MESHES[1::2]),
        slow("messages", MESHES[::2]),
    ],
)
@on_ranks(4)
def test_every_element_arrives_from_one_source_and_from_several_at_once(
    asked: str, meshes: list[str]
) -> None:
    """Awkward shapes and dtypes, tensor-parallel windows, and what has no address."""
    everything = awkward_tensors((torch.float32, torch.bfloat16, torch.bool))
    for names in meshes:
        dims = tuple(names.split())
        mesh = init_device_mesh("cpu", (4,) if len(dims) == 1 else (2, 2), mesh_dim_names=dims)
        here = Mesh(mesh).here
        for source, lots, bucket_bytes in (
            (3, {2: everything}, 1 << 30),
            (0, {2: everything[:5]}, 60),
            (2, {rank: everything[rank : rank + 9] for rank in range(4)}, 4000),
        ):
            cargoes = {rank: cargoes_of(lot, mesh, rank) for rank, lot in lots.items()}
            windows = windows_of(mesh, source) if "tp" in names else []
            with Transport(Mesh(mesh), Agreement(), bucket_bytes, asked) as way:  # type: ignore[arg-type]
                way.send(cargoes | {source: [*cargoes.get(source, ()), *windows]})
            assert way.way == asked
            expected = dict(everything) | dict.fromkeys(WINDOWS, FULL)
            for cargo in [*windows, *(cargo for each in cargoes.values() for cargo in each)]:
                part = cargo.layout.part(here).of(expected[cargo.name])
                assert torch.equal(cargo.target.view(-1), part), (cargo.name, cargo.layout, mesh)


def windows_of(mesh: Any, source: int) -> list[Cargo]:
    rows, at = "dp_shard" in mesh.mesh_dim_names, Mesh(mesh).here
    given = FULL if dist.get_rank() == source else None
    cargoes = []
    for name, (dim, groups) in WINDOWS.items():
        layout = Layout((7, 12), rows, dim, groups)
        cargoes.append(Cargo(name, layout, FULL.dtype, torch.full(layout.local_shape(at), -1.0), given))
    return cargoes


@pytest.mark.slow
def test_ranks_in_different_pid_namespaces_send_messages() -> None:
    """As in two containers: the pids are the same on both sides, and no rank reads across."""
    separate = ["unshare", "--pid", "--fork", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*separate, "true"], check=False).returncode:
        pytest.skip("needs the right to make pid namespaces")
    store = _host_store()
    environment = os.environ | {
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": "4",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    rank = f"{sys.executable} -m tests.kit.scripts.namespaced"
    both = [
        subprocess.Popen(
            [*separate, "sh", "-c", f"{rank} {first} & {rank} {first + 1}; wait"],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for first in (0, 2)
    ]
    lines = [line for each in both for line in each.communicate(timeout=240)[0].splitlines()]
    found = sorted((json.loads(line) for line in lines), key=lambda each: each["rank"])
    assert [each["way"] for each in found] == ["messages"] * 4
    assert {each["pid"] for each in found[:2]} == {each["pid"] for each in found[2:]}
