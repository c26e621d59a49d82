"""`distributed.context_parallelism.attention`: layouts, and attention over gathered keys and values."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel as of_torch

from composer_dist import _torch
from composer_dist.distributed.context_parallelism.attention import (
    AttentionCall,
    SequenceSplit,
    attention_as,
    check_call,
    distributed_attention,
)
from composer_dist.errors import ParallelismValueError
from tests.kit.world import World, on_ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize(("ranks", "balanced"), [(2, True), (2, False), (3, True), (4, False)])
def test_ranks_share_the_positions(ranks: int, balanced: bool) -> None:
    layouts = [SequenceSplit(24, ranks, rank, balanced) for rank in range(ranks)]
    parts = [layout.positions(CPU) for layout in layouts]
    assert torch.cat(parts).sort().values.tolist() == list(range(24))
    assert all(part.tolist() == sorted(part.tolist()) and len(part) == 24 // ranks for part in parts)
    if balanced:  # as many keys to look at, which is what makes it so
        assert len({int((part + 1).sum()) for part in parts}) == 1


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_parts_are_where_torch_s_ring_expects_them(rank: int, balanced: bool) -> None:
    dist.init_process_group("fake", rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (4,))
    positions = torch.arange(24)
    attention, switch = F.scaled_dot_product_attention, _torch.communication._cp_options.enable_load_balance
    with _torch.ring_attention(mesh, 24, balanced):
        assert F.scaled_dot_product_attention is not attention
        assert _torch.communication._cp_options.enable_load_balance is balanced
        with of_torch(mesh, buffers=[positions], buffer_seq_dims=[0], no_restore_buffers={positions}):
            found = positions.clone()
    assert torch.equal(found, SequenceSplit(24, 4, rank, balanced).positions(CPU))
    assert F.scaled_dot_product_attention is attention
    assert _torch.communication._cp_options.enable_load_balance is switch


def _attention(device: str, dtype: torch.dtype, tolerance: float) -> None:
    mesh = init_device_mesh(device, (2,))
    shapes = [
        ((3, 4, 16, 8), (3, 2, 16, 8), {"enable_gqa": True}),
        ((3, 2, 16, 8), (3, 2, 16, 8), {"scale": 0.3}),
        ((3, 2, 16, 64), (3, 2, 16, 64), {}),
    ]
    for causal, balanced in [(True, True), (True, False), (False, True), (False, False)]:
        layout = SequenceSplit(16, 2, mesh.get_local_rank(), balanced)
        positions = layout.positions(torch.device(device))
        for query_shape, shape, options in shapes:
            torch.manual_seed(0)
            heads = [torch.randn(one, device=device, dtype=dtype) for one in (query_shape, shape, shape)]
            whole = [head.requires_grad_() for head in heads]
            parts = [head.detach().index_select(2, positions).requires_grad_() for head in heads]
            expected = F.scaled_dot_product_attention(*whole, is_causal=causal, **options)
            expected.float().square().sum().backward()
            with distributed_attention(layout, mesh):
                found = F.scaled_dot_product_attention(*parts, is_causal=causal, **options)
                found.float().square().sum().backward()
            pairs = [
                (expected, found),
                *((one.grad, other.grad) for one, other in zip(whole, parts, strict=True)),
            ]
            for one, other in pairs:
                one = one.index_select(2, positions)
                difference = (one - other).abs().max() / one.abs().max()
                assert difference < tolerance, (causal, balanced, options, float(difference))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@on_ranks(2)
def test_attention_and_its_gradients_are_those_of_the_whole_sequence(dtype: Any, tolerance: float) -> None:
    _attention("cpu", dtype, tolerance)


def _ring() -> None:
    from composer_dist.distributed.ranks import process_group

    process_group.init()
    _attention("cuda", torch.bfloat16, 2e-2)
    _attention("cuda", torch.float32, 1e-3)


@pytest.mark.gpu
def test_torch_s_ring_gives_attention_and_its_gradients(world2: World) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    world2(_ring, setup="environment")


@on_ranks(2)
def test_dropout_is_attention_s_own() -> None:
    mesh = init_device_mesh("cpu", (2,))
    ones = torch.ones(1, 1, 8, 4)
    with distributed_attention(SequenceSplit(16, 2, mesh.get_local_rank(), True), mesh):
        dropped = F.scaled_dot_product_attention(ones, ones, ones, dropout_p=0.5)
    assert dropped.unique().numel() > 1


@pytest.mark.parametrize(
    ("query", "key", "mask", "message"),
    [
        ((1, 2, 4, 8), (1, 2, 4, 8), (4, 4), r"a mask \(4, 4\) cannot be split over the sequence \(cp=2\)"),
        ((1, 2, 4, 8), (1, 2, 6, 8), None, "4 queries to 6 keys cannot be .* rank has 4 positions"),
        ((1, 2, 8, 8), (1, 2, 8, 8), None, "8 queries to 8 keys cannot be .* rank has 4 positions"),
    ],
)
def test_attention_that_cannot_be_split_is_refused(query: Any, key: Any, mask: Any, message: str) -> None:
    query, key, mask = (None if shape is None else torch.ones(shape) for shape in (query, key, mask))
    with pytest.raises(ParallelismValueError, match=message):
        check_call(SequenceSplit(8, 2, 0, True), AttentionCall(query, key, key, mask))


def test_attention_is_torch_s_again_after_an_error() -> None:
    before = F.scaled_dot_product_attention
    with pytest.raises(RuntimeError, match="mine"), attention_as(lambda: torch.ones(1)):
        raise RuntimeError("mine")
    assert F.scaled_dot_product_attention is before
