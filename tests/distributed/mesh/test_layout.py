"""Parts of tensors: what torch's own DTensor puts on each rank, as views, runs and shapes."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from composer_dist._torch import StridedShard
from composer_dist.distributed.mesh.layout import Coordinate, Layout
from composer_dist.tensors.parts import chunk
from tests.kit.meshes import expected_part, layouts


@pytest.mark.parametrize("layout", layouts(), ids=str)
def test_parts_are_what_torch_chunk_gives(layout: Layout) -> None:
    full = torch.arange(math.prod(layout.shape)).view(layout.shape)
    turned = full.permute(*reversed(range(full.ndim))).contiguous().permute(*reversed(range(full.ndim)))
    for shards, tps in [(1, 1), (2, 1), (1, 2), (2, 2), (3, 2), (5, 3)]:
        count = 0
        for shard, tp in itertools.product(range(shards), range(tps)):
            at = Coordinate(shard, shards, tp, tps)
            want = expected_part(full, layout, at)
            part = layout.part(at)
            assert layout.local_shape(at) == tuple(want.shape)
            for source in (full, turned):
                assert torch.equal(part.of(source), want.reshape(-1))
                assert torch.equal(part.of(source, 1, 4), want.reshape(-1)[1:4])
            pieces = [full.view(-1)[first : first + length] for first, length in part.runs()]
            assert torch.equal(torch.cat(pieces) if pieces else full.view(-1)[:0], want.reshape(-1))
            written = torch.full_like(full, -1)
            part.put(written, want.reshape(-1)[1:], 1)
            part.put(written, want.reshape(-1)[:1])
            assert torch.equal(part.of(written), want.reshape(-1))
            assert int((written >= 0).sum()) == want.numel(), "nothing beyond the part"
            count += part.numel
        if layout.rows and (layout.tp_dim is not None or tps == 1):
            assert count == full.numel()


def test_a_part_of_contiguous_rows_is_one_run_and_a_view() -> None:
    full = torch.arange(40.0).view(10, 4)
    part = Layout((10, 4), rows=True).part(Coordinate(1, 3))
    assert list(part.runs()) == [(16, 16)]
    assert part.of(full).data_ptr() == full[4:].data_ptr()


def test_state_is_cut_where_its_dimensions_are_those_of_the_parameter() -> None:
    layout = Layout((8, 6), rows=True, tp_dim=1)
    assert layout.like((8, 6)) == layout
    assert layout.like((8, 1)) == Layout((8, 1), rows=True)
    assert layout.like((1, 6)) == Layout((1, 6), tp_dim=1)
    assert layout.like((8, 1)).local_shape(Coordinate(0, 2, 1, 2)) == (4, 1)


def test_rows_are_cut_as_torch_chunk_cuts_them() -> None:
    for rows in range(1, 12):
        for shards in (1, 2, 3, 4, 8):
            chunks = torch.arange(rows).chunk(shards)
            for shard in range(shards):
                first, last = chunk(rows, shards, shard)
                want = chunks[shard].tolist() if shard < len(chunks) else []
                assert list(range(first, last)) == want


@pytest.mark.parametrize(
    ("names", "placements", "known"),
    [
        (("dp_shard",), [Shard(0)], True),
        (("dp_shard",), [Shard(1)], False),
        (("dp_replicate", "dp_shard"), [Replicate(), Shard(0)], True),
        (("dp_replicate", "dp_shard"), [Shard(0), Shard(0)], False),
        (("dp_replicate", "dp_shard"), [Shard(0), Replicate()], False),
        (("dp_shard", "cp"), [Shard(0), Replicate()], False),
        (("a", "b"), [Shard(0), Replicate()], False),
        (("dp_shard", "tp"), [Shard(0), Shard(1)], True),
        (("dp_shard", "tp"), [StridedShard(0, split_factor=2), Shard(0)], True),
        (("dp_shard", "tp"), [Shard(0), Shard(0)], False),
        (("dp_shard", "tp"), [StridedShard(0, split_factor=2), Replicate()], False),
        (("dp_shard", "tp"), [Replicate(), Partial()], False),
        (("a", "b", "c"), [Replicate(), Replicate(), Shard(0)], False),
    ],
)
def test_ways_to_cut_that_only_a_user_knows_are_told_from_our_own(
    names: tuple[str, ...], placements: list[Placement], known: bool
) -> None:
    dist.init_process_group("fake", rank=0, world_size=8)
    mesh = init_device_mesh(
        "cpu", (8 // 2 ** (len(names) - 1), *[2] * (len(names) - 1)), mesh_dim_names=names
    )
    tensor = DTensor.from_local(
        torch.zeros(2, 2), mesh, placements, run_check=False, shape=torch.Size((8, 8)), stride=(8, 1)
    )
    assert (Layout.known(tensor) is not None) == known
    assert Layout.known(torch.zeros(2)) == Layout((2,))
