"""Hosts, made out of the ranks of one machine: everything arrives, and crosses between them once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composer_dist.distributed import parallelize_model
from composer_dist.distributed.mesh.layout import Coordinate, Layout, grid
from composer_dist.distributed.moving import memory as peer_memory
from composer_dist.distributed.moving import way as transport
from composer_dist.distributed.moving.host_relay import Relay, find_hosts
from composer_dist.distributed.moving.transfer import Cargo
from composer_dist.distributed.moving.way import Transport
from composer_dist.distributed.ranks import agreement
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.errors import ParallelismError, ParallelismRuntimeError
from tests.distributed.moving.test_transfer import cargoes_of, check, profiled, tensors
from tests.distributed.test_prepare import attempt, check_marked
from tests.kit.preparable import built, config, same, values
from tests.kit.worker import HOST
from tests.kit.world import WorkerError, _host_store, run

MIB = 1 << 20
Hosts = Sequence[Sequence[int]]
PAIRS = ((0, 1), (2, 3))
UNEVEN = ((0,), (1, 2, 3))
MIXED = ((0, 3), (1,), (2,))


@contextmanager
def hosts(groups: Hosts) -> Iterator[None]:
    """Ranks can read the memory of their group only."""
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    mine = {pids[rank] for group in groups if dist.get_rank() in group for rank in group}
    real = peer_memory.can_read
    peer_memory.can_read = lambda beacon: beacon["pid"] in mine and real(beacon)
    try:
        yield
    finally:
        peer_memory.can_read = real


@contextmanager
def traffic(groups: Hosts) -> Iterator[list[int]]:
    """Bytes of each message that this rank sends to another host."""
    sent: list[int] = []
    home = next(set(group) for group in groups if dist.get_rank() in group)
    batch, broadcast, send = dist.batch_isend_irecv, dist.broadcast, dist.send

    def count(tensor: torch.Tensor, peer: int | None) -> None:
        if peer not in home:
            sent.append(tensor.nbytes)

    def counted_batch(operations: list[Any]) -> Any:
        for each in operations:
            if each.op is dist.isend:
                count(each.tensor, each.peer)
        return batch(operations)

    def counted_send(tensor: torch.Tensor, peer: int) -> None:
        count(tensor, peer)
        send(tensor, peer)

    def refused(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a broadcast, whose way is not known")

    dist.batch_isend_irecv, dist.broadcast, dist.send = counted_batch, refused, counted_send
    try:
        yield sent
    finally:
        dist.batch_isend_irecv, dist.broadcast, dist.send = batch, broadcast, send


def mesh_named(names: str) -> Any:
    """`"dp_replicate tp"`: 2 ranks in each of two dimensions; one dimension has all."""
    dims = tuple(names.split())
    return init_device_mesh("cpu", (4,) if len(dims) == 1 else (2, 2), mesh_dim_names=dims)


MESHES = ["dp_shard", "dp_replicate", "dp_replicate dp_shard", "dp_shard tp", "dp_replicate tp"]


@pytest.mark.parametrize("groups", [PAIRS, UNEVEN, MIXED])
def test_every_element_arrives_from_any_source(groups: Hosts) -> None:
    run(arrives, 4, groups)


def arrives(groups: Hosts) -> None:
    """Awkward shapes and dtypes, windows, what has no address; one source at a time, and all of them."""
    everything = tensors((torch.float32, torch.bfloat16, torch.bool))
    with hosts(groups):
        for names in MESHES:
            mesh = mesh_named(names)
            for lots, bucket_bytes in (
                ({2: everything}, 1 << 30),
                ({2: everything[:5]}, 100),
                ({rank: everything[rank : rank + 9] for rank in range(4)}, 4000),
            ):
                cargoes = {source: cargoes_of(lot, mesh, source) for source, lot in lots.items()}
                windows = windows_of(mesh, source=3) if "tp" in names else []
                with Transport(mesh, Agreement(), bucket_bytes) as way:
                    way.send(cargoes | {3: [*cargoes.get(3, ()), *windows]})
                assert way.way == "hosts"
                for source, lot in lots.items():
                    check_parts(cargoes[source], dict(lot), mesh)
                check_parts(windows, dict.fromkeys(WINDOWS, FULL), mesh)


FULL = torch.arange(7.0 * 12).view(7, 12)
WINDOWS = {"rows": (0, 1), "columns": (1, 1), "fused": (1, 3), "not cut": (None, 1)}


def windows_of(mesh: Any, source: int) -> list[Cargo]:
    rows, at = "dp_shard" in mesh.mesh_dim_names, Coordinate.of(mesh)
    given = FULL if dist.get_rank() == source else None
    cargoes = []
    for name, (dim, groups) in WINDOWS.items():
        layout = Layout((7, 12), rows, dim, groups)
        target = torch.full(layout.local_shape(at), -1.0)
        cargoes.append(Cargo(name, layout, FULL.dtype, target, given))
    return cargoes


def check_parts(cargoes: Sequence[Cargo], expected: dict[str, torch.Tensor], mesh: Any) -> None:
    for cargo in cargoes:
        part = cargo.layout.part(Coordinate.of(mesh)).of(expected[cargo.name])
        assert torch.equal(cargo.target.view(-1), part), (cargo.name, cargo.layout, mesh)


@pytest.mark.parametrize("groups", [PAIRS, UNEVEN, MIXED])
def test_what_a_host_needs_crosses_the_network_to_it_once(groups: Hosts) -> None:
    per_rank = run(crossing, 4, groups)
    for number in range(len(per_rank[0])):
        found, expected = zip(*(each[number] for each in per_rank), strict=True)
        assert sum(found) == expected[0]


def crossing(groups: Hosts) -> list[tuple[int, int]]:
    """For each mesh and source: bytes that this rank sent to other hosts, and what all should have."""
    counts = []
    everything = [(str(i), torch.full((8, 3 * MIB // 16), float(i))) for i in range(3)]
    everything += [(f"small {i}", torch.full((8, 3), float(i))) for i in range(100)]
    with hosts(groups):
        for names in MESHES:
            mesh = mesh_named(names)
            cut = names.endswith("dp_shard")
            for source in (0, 1):
                cargoes = [c for c in cargoes_of(everything, mesh, source) if c.cut is cut]
                if not cut:
                    cargoes += windows_of(mesh, source) if "tp" in names else []
                with Transport(mesh, Agreement(), 4 * MIB) as way, traffic(groups) as sent:
                    way.send({source: cargoes})
                check_parts(cargoes, dict(everything) | dict.fromkeys(WINDOWS, FULL), mesh)
                counts.append((sum(sent), needed_elsewhere(cargoes, grid(mesh), groups, source)))
    return counts


def needed_elsewhere(cargoes: Sequence[Cargo], table: torch.Tensor, groups: Hosts, source: int) -> int:
    """Bytes that the hosts without the source need, each host's different parts counted once."""
    total = 0
    for group in groups:
        for cargo in cargoes if source not in group else ():
            parts = {cargo.layout.part(Coordinate.in_grid(table, rank)) for rank in group}
            total += sum(part.numel for part in parts) * cargo.dtype.itemsize
    return total


def prepared(groups: Hosts, device: str, way: str, **options: Any) -> tuple[Any, str, int]:
    model = built(device="cpu" if device == "cpu" and dist.get_rank() == 0 else "meta")
    with hosts(groups):
        done = parallelize_model(model, config(transport=way, **options))
    assert done.transport == way or way == "auto"
    return values(model), str(done), done.bytes_moved


@pytest.mark.parametrize("groups", [PAIRS, UNEVEN, MIXED])
@pytest.mark.parametrize(("device", "replicas"), [("cpu", 1), ("cpu", 2), ("meta", 1), ("meta", 4)])
def test_a_model_is_the_same_as_by_messages(groups: Hosts, device: str, replicas: int) -> None:
    by_messages = run(prepared, 4, groups, device, "messages", replicas=replicas)[0][0]
    for found, report, moved in run(prepared, 4, groups, device, "auto", replicas=replicas):
        same(found, by_messages)
        assert moved > 0
        assert "once per host" in report


@pytest.mark.parametrize("kind", ["cut", "whole", "small"])
def test_a_leader_stages_two_buckets_and_nobody_else_anything(kind: str) -> None:
    for groups in (PAIRS, UNEVEN):
        peaks = run(delivery_peak, 4, groups, kind)
        leaders = [group[0] for group in groups[1:]]
        for rank, peak in enumerate(peaks):
            limit = 2 * 8 * MIB if rank in leaders else 8 * MIB if rank == 0 else 0
            assert peak <= limit + MIB, (groups, rank)
        assert max(peaks[rank] for rank in leaders) >= MIB


def delivery_peak(groups: Hosts, kind: str) -> int:
    mesh, giant = mesh_named("dp_shard"), torch.ones(4096, 4096)  # 64 MiB
    everything = [(str(i), part) for i, part in enumerate(giant.split(16))] if kind == "small" else []
    everything = everything or [("giant", giant)]
    cargoes = [c for c in cargoes_of(everything, mesh, 0) if c.cut is (kind != "whole")]
    together = Agreement()
    together.collectively = lambda step, body: body()  # the profiler sees one thread only
    with hosts(groups), Transport(mesh, together, 8 * MIB) as way:
        way.send({0: cargoes_of(tensors()[:1], mesh, 0)})  # the way is found
        peak = profiled(lambda: way.send({0: cargoes}))
        assert way.way == "hosts"
    check(cargoes, everything, mesh)
    return peak


def ways(readable: dict[int, Sequence[int]], asked: str) -> str:
    """The way taken, or the error, where each rank can read these others."""
    with hosts([(dist.get_rank(), *readable[dist.get_rank()])]):
        try:
            model = built(device="meta" if dist.get_rank() else "cpu")
            return parallelize_model(model, config(transport=asked)).transport
        except ParallelismError as error:
            return str(error)


ALONE: dict[int, Sequence[int]] = {0: (), 1: (), 2: (), 3: ()}
ONE_WAY: dict[int, Sequence[int]] = {0: (1,), 1: (), 2: (3,), 3: (2,)}
TOGETHER: dict[int, Sequence[int]] = dict.fromkeys(range(4), (0, 1, 2, 3))


def test_where_ranks_are_alone_or_read_one_way_only_messages_are_sent() -> None:
    assert run(ways, 4, ALONE, "auto") == ["messages"] * 4
    assert run(ways, 4, ONE_WAY, "auto") == ["messages"] * 4
    alone, one_way = run(ways, 4, ALONE, "hosts"), run(ways, 4, ONE_WAY, "hosts")
    assert len(set(alone)) == len(set(one_way)) == 1
    assert alone[0].startswith("transport='hosts' was asked for, but no rank can read the memory of another")
    assert one_way[0].startswith("transport='hosts' was asked for, but some ranks can read")


def test_one_host_is_a_case_of_hosts() -> None:
    assert run(ways, 4, TOGETHER, "hosts") == ["hosts"] * 4


def test_hosts_are_found_where_reading_is_mutual() -> None:
    assert find_hosts({0: [0, 1], 1: [0, 1], 2: [2], 5: []}) == [(0, 1), (2,), (5,)]
    assert find_hosts({0: [1], 1: []}) is None
    assert find_hosts({0: [1], 1: [0, 2], 2: [1]}) is None  # not transitive


def buffer_counted(groups: Hosts) -> int:
    """Bytes sent between hosts for a model of one replicated parameter and one buffer."""
    with torch.device("meta" if dist.get_rank() else "cpu"):
        model = nn.Module()
        model.scale = nn.Parameter(torch.ones(()))  # scalars stay plain
        model.register_buffer("table", torch.arange(1000.0))
        model.weight = nn.Parameter(torch.ones(4, 4))
    with hosts(groups), traffic(groups) as sent:
        done = parallelize_model(model, config(transport="hosts"))
    assert torch.equal(model.table, torch.arange(1000.0))
    assert list(done.plain_parameters) == ["scale"]
    return sum(sent)


def test_buffers_and_plain_parameters_cross_once_per_host() -> None:
    assert run(buffer_counted, 4, PAIRS) == [4004 + 2 * 16, 0, 0, 0]
    assert run(buffer_counted, 4, MIXED) == [4004 + 2 * 16, 4004, 0, 0]


@pytest.mark.parametrize("victim", [0, 1, 2, 3])
def test_a_rank_that_dies_during_the_relay_is_reported_alike(victim: int) -> None:
    with pytest.raises(WorkerError) as failure:
        run(dies, 4, victim)
    assert list(failure.value.errors) == [victim]
    survivors = list(failure.value.results.values())
    assert len(survivors) == 3
    assert len(set(survivors)) == 1
    assert survivors[0][0] is ParallelismRuntimeError
    assert f"Rank {victim}" in survivors[0][1]


def dies(victim: int) -> tuple[type, str]:
    """The source, one beside it that reads it, a leader, one that reads the leader."""
    agreement.GRACE = agreement.MARGIN = timedelta(seconds=1)
    model = built(device="meta" if dist.get_rank() else "cpu")
    tick, copy = Relay._tick, transport.Transport._copy

    def third(relay: Relay, lanes: Any, number: int, stage: Any) -> int:
        if number == 2:
            os._exit(9)
        return tick(relay, lanes, number, stage)

    if dist.get_rank() == victim:
        Relay._tick = third
        if victim == 1:
            transport.Transport._copy = lambda *args: os._exit(9)
    try:
        with hosts(PAIRS):
            outcome = attempt(model, config(bucket_bytes=256, transport="hosts"))
    finally:
        Relay._tick, transport.Transport._copy = tick, copy
        agreement.GRACE = agreement.MARGIN = timedelta(seconds=4)
    check_marked(model, outcome[1])
    return outcome


@pytest.mark.slow
def test_hosts_are_found_across_pid_namespaces() -> None:
    """As in two containers: the same pids on both sides, and nobody reads across."""
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
    rank = f"{sys.executable} -m tests.kit.namespaced"
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
    assert [each["way"] for each in found] == ["hosts"] * 4
    assert {each["pid"] for each in found[:2]} == {each["pid"] for each in found[2:]}
