"""Clipping by norm and value, against one process on the full batch."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from composer_dist.distributed import parallelize_model, unparallelize_model
from composer_dist.distributed.training.clipping import clip_grad_norm, clip_grad_value
from composer_dist.errors import ParallelismRuntimeError, ParallelismValueError
from tests.kit.compare import fails, full
from tests.kit.gradients import assert_grads, batch, grads, loss_of, prepared, reference
from tests.kit.meshes import mine
from tests.kit.world import on_ranks

pytestmark = pytest.mark.promise(32)


def both_with_gradients(reshard: bool | int = True, kind: str = "fsdp") -> tuple[nn.Module, nn.Module]:
    """A prepared model and its unsharded copy, after the backward of one batch."""
    model, single = prepared(kind, reshard)
    (x,) = batch()
    reference(single, [x])
    loss_of(model(mine(x))).backward()
    return model, single


@pytest.mark.parametrize(
    ("ranks", "kind", "norm_type", "max_norm"),
    [
        *[(2, kind, p, 0.05) for kind in ("fsdp", "hsdp", "ddp") for p in (1.0, 2.0, 3.5, math.inf)],
        (2, "fsdp", 2.0, 1e6),  # small gradients are left alone
        (4, "hsdp", 2.0, 0.05),
    ],
)
@on_ranks("ranks")
def test_norm_over_sharded_and_plain_gradients(
    ranks: int, kind: str, norm_type: float, max_norm: float
) -> None:
    model, single = both_with_gradients(kind=kind)
    expected = nn.utils.clip_grad_norm_(single.parameters(), max_norm, norm_type)
    norm = clip_grad_norm(model, max_norm, norm_type)
    assert type(norm) is torch.Tensor
    assert norm.shape == ()
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    assert_grads(model, grads(single))
    norms = [torch.empty_like(norm) for _ in range(ranks)]
    dist.all_gather(norms, norm)
    assert all(torch.equal(norm, other) for other in norms)


@on_ranks(2)
def test_sparse_gradients() -> None:
    """A row that is looked up twice counts once, as the sum."""
    model, single = (nn.Embedding(6, 3, sparse=sparse) for sparse in (True, False))
    single.load_state_dict(model.state_dict())
    parallelize_model(model, "ddp")
    x = torch.tensor([0, 0, 1, 1])
    single(x).square().sum().backward()
    model(x).square().sum().backward()
    expected = nn.utils.clip_grad_norm_(single.parameters(), 0.5)
    torch.testing.assert_close(clip_grad_norm(model, 0.5), expected)
    torch.testing.assert_close(model.weight.grad.to_dense(), single.weight.grad)
    clip_grad_value(model, 0.01)
    nn.utils.clip_grad_value_(single.parameters(), 0.01)
    torch.testing.assert_close(model.weight.grad.to_dense(), single.weight.grad)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@on_ranks(4)
def test_several_meshes_frozen_and_missing_gradients(norm_type: float) -> None:
    """FSDP2's mesh, another mesh, both dimensions of a 2-D mesh, replicated, plain, frozen."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    generator = torch.Generator().manual_seed(1)
    layouts = [
        (grid["dp"], [Shard(0)]),
        (grid["tp"], [Shard(1)]),
        (grid, [Shard(0), Shard(1)]),
        (grid, [Replicate(), Shard(0)]),
        (grid, [Replicate(), Replicate()]),
        None,
        "unused",
        "frozen",
    ]
    parameters, single = [], []
    for layout in layouts:
        value, grad = torch.randn(2, 5, 3, generator=generator)
        single.append(nn.Parameter(value))
        single[-1].grad = None if layout == "unused" else grad
        parameter = nn.Parameter(value)
        parameter.grad = None if layout == "unused" else grad.clone()
        if isinstance(layout, tuple):
            parameter = nn.Parameter(distribute_tensor(value, *layout))
            parameter.grad = distribute_tensor(grad.clone(), *layout)
        parameter.requires_grad_(layout != "frozen")
        parameters.append(parameter)
    # Only the first half of the data-parallel ranks has a gradient of the first parameter, which
    # is 3 of its 5 rows: the others must not be waited for in vain.
    single[0].grad[3:] = 0
    if grid["dp"].get_local_rank() != 0:
        parameters[0].grad = None
    expected = nn.utils.clip_grad_norm_(single, 0.1, norm_type)
    norm = clip_grad_norm([*parameters, parameters[1]], 0.1, norm_type)  # one of them twice
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    for parameter, plain in zip(parameters[1:], single[1:], strict=True):
        if plain.grad is None:
            assert parameter.grad is None
        else:
            torch.testing.assert_close(full(parameter.grad), plain.grad)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@on_ranks(2)
def test_non_finite_norms_are_returned_on_every_rank(bad: float, norm_type: float) -> None:
    model, _ = both_with_gradients()
    if dist.get_rank() == 1:
        grad = model.head.weight.grad
        assert isinstance(grad, DTensor)
        grad.to_local()[0, 0] = bad
    torch.testing.assert_close(clip_grad_norm(model, 1.0, norm_type), torch.tensor(bad), equal_nan=True)


@pytest.mark.promise(103)
@pytest.mark.parametrize("reshard", [True, False, 1])
@on_ranks(2)
def test_clipping_after_an_evaluation(reshard: bool | int) -> None:
    model, single = both_with_gradients(reshard)
    with torch.no_grad():
        model.eval()(mine(batch()[0]))  # leaves gathered parameters registered
    expected = nn.utils.clip_grad_norm_(single.parameters(), 0.05)
    torch.testing.assert_close(clip_grad_norm(model, 0.05), expected, rtol=1e-6, atol=0)
    assert_grads(model, grads(single))


@on_ranks(2)
def test_clipping_by_value() -> None:
    model, single = both_with_gradients()
    nn.utils.clip_grad_value_(single.parameters(), 0.01)
    clip_grad_value(model, 0.01)
    assert_grads(model, grads(single))


@pytest.mark.promise(118)
@on_ranks(2)
def test_parameters_of_another_time_are_refused() -> None:
    model = nn.Linear(4, 4)
    before = list(model.parameters())
    parallelize_model(model, "fsdp")
    model(torch.ones(2, 4)).sum().backward()
    with fails(ParallelismRuntimeError, "clip_grad_norm was given weight, bias from before the preparation"):
        clip_grad_norm(before, 0.1)
    with fails(ParallelismRuntimeError, "clip_grad_value was given weight from before the preparation"):
        clip_grad_value(before[0], 0.1)
    shards = list(model.parameters())
    assert clip_grad_norm(shards, 0.1) > 0.1
    unparallelize_model(model)
    for one in shards:
        one.grad = None
    with fails(ParallelismRuntimeError, "weight, bias from before unparallelize_model, which the model no"):
        clip_grad_norm(shards, 0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_process_any_dtype(dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.zeros(3, dtype=dtype))
    parameter.grad = torch.tensor([3.0, 4.0, 0.0], dtype=dtype)
    norm = clip_grad_norm(parameter, 1.0)
    assert norm.item() == 5.0
    assert norm.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
    expected = torch.tensor([0.6, 0.8, 0.0], dtype=dtype)
    torch.testing.assert_close(parameter.grad, expected, rtol=1e-2, atol=0)


def test_nothing_to_clip() -> None:
    assert clip_grad_norm([], 1.0).item() == 0.0
    assert clip_grad_norm(nn.Linear(2, 2), 1.0).item() == 0.0


@pytest.mark.parametrize(("max_norm", "norm_type"), [(1.0, 0.0), (1.0, -2.0), (-1.0, 2.0)])
def test_impossible_norms_are_refused(max_norm: float, norm_type: float) -> None:
    with pytest.raises(ParallelismValueError, match="norm_type > 0 and max_norm >= 0"):
        clip_grad_norm(nn.Linear(2, 2), max_norm, norm_type)
    with pytest.raises(ParallelismValueError, match="max_value >= 0, not -0.5"):
        clip_grad_value(nn.Linear(2, 2), -0.5)
