"""Delivery: every element arrives once, in bounded memory, over any mesh; and the hash of a tensor."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from composer_dist.distributed.mesh.mesh import Mesh
from composer_dist.distributed.moving.deliver import deliver, take_part
from composer_dist.distributed.moving.messages import Cargo
from composer_dist.tensors.fingerprint import fingerprint
from tests.kit.grids import in_the_default_run, slow
from tests.kit.measure import profiled
from tests.kit.meshes import awkward_tensors, cargoes_of, mesh_of
from tests.kit.world import on_ranks, run

MIB = 1 << 20


def check(cargoes: list[Cargo], everything: list[tuple[str, torch.Tensor]], mesh: Any) -> None:
    here, by_name = mesh.get_coordinate()[-1], dict(everything)
    for cargo in cargoes:
        expected = by_name[cargo.name]
        if cargo.cut:
            chunks = expected.chunk(mesh.size(mesh.ndim - 1))
            expected = chunks[here] if here < len(chunks) else expected[:0]
        assert torch.equal(cargo.target, expected), (cargo.name, cargo.cut)


MESHES = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]


@pytest.mark.parametrize(
    ("bucket_bytes", "size", "replicas"),
    in_the_default_run(
        *((1, 4, 2), (100, 1, 1), (100, 2, 1)),
        *((1 << 30, 2, 1), (1 << 30, 4, 1), (1 << 30, 4, 4)),
        among=[(nbytes, *mesh) for nbytes in (1, 100, 1 << 30) for mesh in MESHES],
    ),
)
@on_ranks("size")
def test_every_element_arrives_from_any_source(bucket_bytes: int, size: int, replicas: int) -> None:
    mesh, everything = mesh_of(replicas), awkward_tensors() if bucket_bytes > 1 else awkward_tensors()[:3]
    for source in range(dist.get_world_size()):
        cargoes = cargoes_of(everything, mesh, source)
        deliver({source: cargoes}, Mesh(mesh), bucket_bytes)
        check(cargoes, everything, mesh)


@on_ranks(2)
def test_every_dtype_travels() -> None:
    names = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float64 complex64 float8_e4m3fn"
    mesh = mesh_of(1)
    everything = awkward_tensors([getattr(torch, name) for name in names.split()])
    cargoes = cargoes_of(everything, mesh, 0)
    deliver({0: cargoes}, Mesh(mesh), 1000)
    for cargo in cargoes:  # float8 has no comparison
        cargo.target = cargo.target.float() if "float8" in cargo.name else cargo.target
    check(cargoes, [(n, v.float() if "float8" in n else v) for n, v in everything], mesh)


@on_ranks(2)
def test_a_source_of_another_dtype_is_converted_on_its_way() -> None:
    mesh = mesh_of(1)
    everything = [(name, value.to(torch.bfloat16)) for name, value in awkward_tensors()]
    cargoes = cargoes_of(everything, mesh, 0)
    for cargo in cargoes:
        cargo.source = None if cargo.source is None else cargo.source.double()
    deliver({0: cargoes}, Mesh(mesh), 512)
    check(cargoes, everything, mesh)


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (4, 2)])
@on_ranks("ranks")
def test_large_pieces_and_large_tensors(ranks: int, replicas: int) -> None:
    """Slices above a megabyte travel straight between storages, one tensor in many buckets."""
    mesh = mesh_of(replicas)
    giant = torch.arange(3_000_001 * 2, dtype=torch.float32).reshape(-1, 2)
    everything = [("giant", giant), ("turned", giant.t()), ("small", torch.ones(3, 3))]
    cargoes = cargoes_of(everything, mesh, 0)
    moved = deliver({0: cargoes}, Mesh(mesh), 4 * MIB)
    check(cargoes, everything, mesh)
    assert moved > giant.nbytes


@on_ranks(2)
def test_thousands_of_small_tensors_share_messages() -> None:
    mesh = mesh_of(1)
    everything = [(str(number), torch.full((3, 2), float(number))) for number in range(3000)]
    cargoes = cargoes_of(everything, mesh, 0)
    with (
        mock.patch.object(dist, "batch_isend_irecv", wraps=dist.batch_isend_irecv) as batches,
        mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as broadcasts,
    ):
        deliver({0: cargoes}, Mesh(mesh), MIB)
    assert batches.call_count + broadcasts.call_count <= 4
    check(cargoes, everything, mesh)


@pytest.mark.parametrize("kind", ["giant", "uneven", slow("turned"), slow("small"), "whole"])
def test_memory_is_bounded_by_the_buckets(kind: str) -> None:
    peaks = run(delivery_peak, 2, kind)
    assert max(peaks) <= 3 * 2 * 8 * MIB + MIB  # of 64 MiB: gloo may still hold the bucket before
    assert max(peaks) > 0 or kind in {"giant", "uneven"}  # these need no copy


def delivery_peak(kind: str) -> int:
    mesh = mesh_of(1)
    giant = torch.ones(4096, 4096)  # 64 MiB
    everything = {
        "giant": [("giant", giant)],
        "uneven": [("uneven", giant.view(-1)[: 4095 * 4096].view(4095, 4096))],
        "turned": [("turned", giant.t())],
        "small": [(str(i), part) for i, part in enumerate(giant.split(16))],
        "whole": [(str(i), part) for i, part in enumerate(giant.split(16))],
    }[kind]
    cargoes = [c for c in cargoes_of(everything, mesh, 0) if c.cut is (kind != "whole")]
    peak = profiled(lambda: deliver({0: cargoes}, Mesh(mesh), 8 * MIB))
    check(cargoes, everything, mesh)
    return peak


@on_ranks(2)
def test_slices_are_taken_without_a_copy_of_the_whole() -> None:
    mesh = mesh_of(1)
    everything = [*awkward_tensors(), ("turned", torch.arange(2.0**21).reshape(1024, -1).t())]
    cargoes = cargoes_of(everything, mesh, source=dist.get_rank())
    peak = profiled(lambda: [take_part(cargo, Mesh(mesh).here) for cargo in cargoes])
    assert peak <= 2 * MIB  # of 8: what is no view goes a megabyte at a time
    check(cargoes, everything, mesh)


def test_the_fingerprint_sees_every_byte_the_shape_and_no_layout() -> None:
    torch.manual_seed(0)
    for value in (torch.randn(700, 901), torch.randn(33).bfloat16(), torch.arange(7).to(torch.uint8)):
        reference = fingerprint(value)
        assert fingerprint(value.clone()) == reference
        if value.ndim == 2:
            assert fingerprint(value.t().contiguous().t()) == reference
            assert fingerprint(value.reshape(901, 700)) != reference
        for index in (0, value.numel() // 2, value.numel() - 1):
            other = value.clone()
            other.view(-1)[index] += 1
            assert fingerprint(other) != reference
        assert fingerprint(torch.cat([value[1:], value[:1]])) != reference
    assert fingerprint(torch.tensor(float("nan"))) == fingerprint(torch.tensor(float("nan")))
    assert fingerprint(torch.zeros(0, 2)) != fingerprint(torch.zeros(2, 0))
    assert fingerprint(torch.ones(1, 3)[:, 1]) == fingerprint(torch.ones(1))
    big = torch.ones(2048, 1024).t()
    assert profiled(lambda: fingerprint(big)) <= 4 * MIB
