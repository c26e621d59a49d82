"""Tensors that users have cut in their own ways come together as they were."""

from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from composer_dist._torch import StridedShard
from composer_dist.distributed.moving.gather import gather
from tests.kit.world import on_ranks

pytestmark = pytest.mark.promise(105)


@on_ranks(4)
def test_tensors_that_are_cut_in_any_way_are_gathered_without_torch_s_own_collective() -> None:
    two, one = (init_device_mesh("cpu", sizes) for sizes in ((2, 2), (4,)))
    with mock.patch.object(DTensor, "full_tensor", side_effect=AssertionError):
        for shape in ((8, 6), (7, 5), (3, 4, 5)):
            whole = torch.arange(float(torch.Size(shape).numel())).view(shape) - 3
            whole[0, 0], whole[0, -1] = -0.0, torch.nan
            for mesh, placements in (
                (one, [Shard(1)]),
                (two, [Shard(0), Replicate()]),
                (two, [Shard(0), Shard(0)]),
                (two, [Shard(1), Shard(0)]),
                (two, [Replicate(), Shard(len(shape) - 1)]),
                (two, [StridedShard(0, split_factor=2), Replicate()]),
            ):
                for value in (whole, whole > 0, whole.to(torch.float8_e5m2)):
                    if isinstance(placements[0], StridedShard) and shape[0] % 4:
                        continue
                    cut = distribute_tensor(value, mesh, placements, src_data_rank=None)
                    assert bytes(gather(cut).view(torch.uint8).numpy()) == bytes(
                        value.view(torch.uint8).numpy()
                    )
        part = DTensor.from_local(torch.ones(3, 4), two, [Partial(), Shard(0)])
        assert gather(part).equal(torch.full((6, 4), 2.0))
