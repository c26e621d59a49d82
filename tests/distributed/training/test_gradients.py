"""no_sync, clipping, the averaging of plain parameters, against one process on the full batch."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from composer_dist import _torch
from composer_dist.distributed.activations.recompute import checkpoint_modules
from composer_dist.distributed.training.averaging import average_plain_gradients
from composer_dist.distributed.training.gradients import no_sync
from composer_dist.distributed.training.norms import clip_grad_norm, clip_grad_value
from composer_dist.errors import ParallelismRuntimeError, ParallelismTypeError, ParallelismValueError
from tests.kit.world import World

Grads = dict[str, torch.Tensor | None]


@dataclass
class Result:
    """An output that no pytree knows."""

    logits: torch.Tensor
    extra: dict[str, torch.Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor, gain: bool = True) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        return x + (y * self.gain if gain else y)


class Toy(nn.Module):
    """Uneven shards (5 rows), two scalar parameters, a plain matrix, a branch that may not run."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.adapter = nn.Linear(6, 6, bias=False)
        self.head = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor, gain: bool = True, adapt: bool = True) -> Result:
        for block in self.blocks:
            x = block(x, gain)
        if adapt:
            x = x + self.adapter(x)
        logits = self.head(x)
        return Result(logits, {"square": logits.square()})


def is_plain(name: str) -> bool:
    return name.endswith("gain") or name.startswith("adapter")


def batch(count: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(8, 6, generator=generator) for _ in range(count)]


def mine(x: torch.Tensor) -> torch.Tensor:
    """This rank's part of the batch."""
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def loss_of(result: Any) -> torch.Tensor:
    result = result if isinstance(result, Result) else Result(result, {"square": result.square()})
    return result.logits.mean() + result.extra["square"].mean()


def full(grad: torch.Tensor | None) -> torch.Tensor | None:
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def grads(model: nn.Module) -> Grads:
    return {
        name.removeprefix("module."): full(p.grad).clone() if p.grad is not None else None
        for name, p in model.named_parameters()
    }


def reference(model: nn.Module, batches: list[torch.Tensor], **kwargs: Any) -> Grads:
    for x in batches:
        loss_of(model(x, **kwargs)).backward()
    return grads(model)


def assert_grads(model: nn.Module, expected: Grads) -> None:
    actual = grads(model)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if value is None:
            assert actual[name] is None, name
        else:
            torch.testing.assert_close(actual[name], value, msg=lambda text, n=name: f"{n}: {text}")


def mesh_for(kind: str) -> DeviceMesh:
    if kind == "hsdp":
        world = dist.get_world_size()
        names = ("dp_replicate", "dp_shard")
        return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=names)
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))


def prepared(kind: str, reshard: bool | int = True) -> tuple[nn.Module, nn.Module]:
    """A toy model prepared in some way, and its unsharded copy."""
    torch.manual_seed(3)
    model = Toy()
    copied = copy.deepcopy(model)
    if kind == "ddp":
        return DistributedDataParallel(model), copied
    if kind == "replicate":
        return _torch.replicate(model), copied
    mesh = mesh_for(kind)
    plain = {name: p for name, p in model.named_parameters() if is_plain(name)}
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, ignored_params={*plain.values()})
    fully_shard(model, mesh=mesh, ignored_params={*plain.values()})
    average_plain_gradients(model, plain, mesh)
    return model, copied


def flags(model: nn.Module) -> list[bool]:
    return [
        getattr(owner, name)
        for module in model.modules()
        for owner, name, _ in _torch.gradient_sync_flags(module)
    ]


@contextlib.contextmanager
def collectives() -> Iterator[list[str]]:
    """The names of the gradient collectives that run inside."""
    calls: list[str] = []

    def recording(name: str) -> Any:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return original(*args, **kwargs)

        return call

    wanted = ("all_reduce", "reduce_scatter_single", "reduce_scatter_tensor")
    with contextlib.ExitStack() as stack:
        for name in wanted:
            if hasattr(dist, name):
                stack.enter_context(mock.patch.object(dist, name, recording(name)))
        yield calls


# no_sync


def accumulate(kind: str) -> None:
    model, single = prepared(kind)
    batches = batch(3)
    expected = reference(single, batches)
    with no_sync(model):
        for x in batches[:2]:
            with collectives() as calls:
                loss_of(model(mine(x))).backward()
            assert calls == []
    loss_of(model(mine(batches[2]))).backward()
    assert_grads(model, expected)


@pytest.mark.promise(33)
@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "ddp", "replicate"])
def test_accumulation_without_communication_equals_the_full_batch(world2: World, kind: str) -> None:
    world2(accumulate, kind)


@pytest.mark.promise(33)
def test_accumulation_on_a_two_by_two_mesh(world4: World) -> None:
    world4(accumulate, "hsdp")


def sync_forced(kind: str) -> None:
    model, single = prepared(kind)
    batches = batch(2)
    before = flags(model)
    with no_sync(model, enabled=False):
        loss_of(model(mine(batches[0]))).backward()
    assert_grads(model, reference(single, batches[:1]))
    assert flags(model) == before
    loss_of(model(mine(batches[1]))).backward()  # outside: still synchronized
    assert_grads(model, reference(single, batches[1:]))
    model.zero_grad()
    single.zero_grad()
    with no_sync(model), no_sync(model, enabled=False):
        loss_of(model(mine(batches[0]))).backward()
    assert_grads(model, reference(single, batches[:1]))


@pytest.mark.promise(33)
@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "ddp", "replicate"])
def test_enabled_false_synchronizes_and_leaves_sync_on(world2: World, kind: str) -> None:
    world2(sync_forced, kind)


def nested_and_interrupted(kind: str) -> None:
    model, _ = prepared(kind)
    if kind in {"fsdp", "hsdp"}:
        model.blocks[0].set_requires_gradient_sync(False)  # a state of the user's own
    else:
        model(batch()[0])  # composable replicate makes its reducer in the first forward
    before = flags(model)
    with no_sync(model, enabled=False):
        synchronized = flags(model)
    assert flags(model) == before
    with no_sync(model):
        off = flags(model)
        with no_sync(model, enabled=False):
            assert flags(model) == synchronized
        assert flags(model) == off
        with contextlib.suppress(ZeroDivisionError), no_sync(model, enabled=False):
            raise ZeroDivisionError
        assert flags(model) == off
    assert flags(model) == before


@pytest.mark.promise(33)
@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "ddp", "replicate"])
def test_restores_each_modules_own_state(world2: World, kind: str) -> None:
    world2(nested_and_interrupted, kind)


@pytest.mark.promise(33)
def test_does_nothing_to_a_model_of_one_process() -> None:
    model = Toy()
    with no_sync(model):
        loss_of(model(batch()[0])).backward()
    assert model.head.weight.grad is not None


# Plain parameters


def average_each_backward(kind: str) -> None:
    model, single = prepared(kind)
    batches = batch(3)
    for count in (1, 2, 3):  # each backward synchronizes what is accumulated so far
        x = batches[count - 1]
        with collectives() as calls:
            loss_of(model(mine(x))).backward()
        dims = 1 if kind == "fsdp" or dist.get_world_size() == 2 else 2
        hsdp_units = 3 if kind == "hsdp" else 0
        assert calls.count("all_reduce") == dims + hsdp_units
        assert_grads(model, reference(single, [x]))


@pytest.mark.promise(94)
@pytest.mark.parametrize("kind", ["fsdp", "hsdp"])
def test_scalars_and_unsharded_parameters_are_averaged_once_a_backward(world2: World, kind: str) -> None:
    world2(average_each_backward, kind)


@pytest.mark.promise(94)
def test_averaging_spans_both_dimensions_of_a_two_by_two_mesh(world4: World) -> None:
    world4(average_each_backward, "hsdp")


def uneven_use() -> None:
    """Rank 1 does not use the adapter, and no rank the gains."""
    model, single = prepared("fsdp")
    (x,) = batch()
    rank = dist.get_rank()
    loss_of(model(mine(x), gain=False, adapt=rank == 0)).backward()
    first, second = x.chunk(2)
    (loss_of(single(first, gain=False)) / 2).backward()
    (loss_of(single(second, gain=False, adapt=False)) / 2).backward()
    assert_grads(model, grads(single))
    assert model.blocks[0].gain.grad is None
    assert model.adapter.weight.grad is not None


@pytest.mark.promise(94)
def test_unused_here_counts_as_zero_and_unused_everywhere_stays_none(world2: World) -> None:
    world2(uneven_use)


def several_passes() -> None:
    first, second = batch(2)
    model, single = prepared("fsdp")
    outputs = [model(mine(first)), model(mine(second))]
    with collectives() as calls:
        (loss_of(outputs[0]) + loss_of(outputs[1])).backward()
    assert calls.count("all_reduce") == 1
    assert_grads(model, reference(single, [first, second]))
    # Two backwards over one forward, through different outputs.
    model, single = prepared("fsdp", reshard=False)
    output = model(mine(first))
    output.logits.mean().backward(retain_graph=True)
    output.extra["square"].mean().backward()
    assert_grads(model, reference(single, [first]))


@pytest.mark.promise(94)
def test_several_forwards_one_backward_and_the_reverse(world2: World) -> None:
    world2(several_passes)


def checkpointed(reshard: bool | int) -> None:
    torch.manual_seed(3)
    model = Toy()
    single = copy.deepcopy(model)
    plain = {name: p for name, p in model.named_parameters() if is_plain(name)}
    mesh = mesh_for("fsdp")
    for block in model.blocks:
        checkpoint_modules(block, [""], "composable", {})
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, ignored_params={*plain.values()})
    fully_shard(model, mesh=mesh, ignored_params={*plain.values()})
    average_plain_gradients(model, plain, mesh)
    batches = batch(2)
    with no_sync(model):
        loss_of(model(mine(batches[0]))).backward()
    loss_of(model(mine(batches[1]))).backward()
    assert_grads(model, reference(single, batches))


@pytest.mark.promise(94)
@pytest.mark.parametrize("reshard", [True, False])
def test_averaging_next_to_activation_checkpointing(world2: World, reshard: bool) -> None:
    world2(checkpointed, reshard)


def after_an_error() -> None:
    torch.manual_seed(3)
    model = Toy()
    single = copy.deepcopy(model)
    averaging = average_plain_gradients(model, dict(model.named_parameters()), None)
    (x,) = batch()

    def fail(grad: torch.Tensor) -> None:
        raise ZeroDivisionError

    result = model(mine(x))
    result.logits.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        loss_of(result).backward()
    model.zero_grad()
    loss_of(model(mine(x))).backward()
    assert_grads(model, reference(single, [x]))
    averaging.remove()
    for each, part in ((model, mine(x)), (single, mine(x))):
        each.zero_grad()
        loss_of(each(part)).backward()
    assert_grads(model, grads(single))  # this rank's own again


@pytest.mark.promise(94)
def test_a_failed_backward_does_not_stop_the_next_one_and_remove_does(world2: World) -> None:
    world2(after_an_error)


def dtypes_and_plain_world() -> None:
    torch.manual_seed(3)
    model = Toy().to(torch.bfloat16)
    model.head.double()
    model.adapter.weight.requires_grad_(False)
    average_plain_gradients(model, dict(model.named_parameters()), None)
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.full_like(p, dist.get_rank() + 1.0)
    x = mine(batch()[0]).to(torch.bfloat16)
    with collectives() as calls, mock.patch.object(Toy, "forward", _bare_forward):
        (model(x) * 0).sum().backward()
    assert calls == ["all_reduce", "all_reduce"]
    for p in model.parameters():
        if p.requires_grad:
            assert p.grad is not None
            assert p.grad.dtype == p.dtype
            assert torch.equal(p.grad, torch.full_like(p, 1.5))
    assert model.adapter.weight.grad is None


def _bare_forward(self: Toy, x: torch.Tensor) -> torch.Tensor:
    return self.blocks[0].gain * x


@pytest.mark.promise(94)
def test_one_all_reduce_per_dtype_and_none_for_frozen_parameters(world2: World) -> None:
    world2(dtypes_and_plain_world)


def bypassing() -> None:
    model, _ = prepared("fsdp")
    x = mine(batch()[0])
    with pytest.raises(ParallelismRuntimeError, match=r"'adapter.weight' but no output"):
        model.adapter(x).sum().backward()
    with no_sync(model):
        model.adapter(x).sum().backward()


@pytest.mark.promise(85)
def test_a_gradient_that_bypasses_the_root_is_an_error(world2: World) -> None:
    world2(bypassing)


@pytest.mark.promise(94)
def test_sharded_parameters_are_refused(world2: World) -> None:
    world2(refuse_sharded)


def refuse_sharded() -> None:
    model = fully_shard(nn.Linear(4, 4))
    with pytest.raises(ParallelismTypeError, match="weight, bias are DTensors"):
        average_plain_gradients(model, dict(model.named_parameters()), None)


@pytest.mark.promise(94)
def test_one_process_needs_no_group() -> None:
    model = Toy()
    average_plain_gradients(model, dict(model.named_parameters()), None)
    single = copy.deepcopy(model)
    loss_of(model(batch()[0])).backward()
    assert_grads(model, reference(single, batch()))
    model.adapter(batch()[0]).sum().backward()  # no ranks, nothing to disagree about


# Clipping


def clip_prepared(kind: str, norm_type: float, max_norm: float) -> None:
    model, single = prepared(kind)
    (x,) = batch()
    reference(single, [x])
    loss_of(model(mine(x))).backward()
    expected = nn.utils.clip_grad_norm_(single.parameters(), max_norm, norm_type)
    norm = clip_grad_norm(model, max_norm, norm_type)
    assert type(norm) is torch.Tensor
    assert norm.shape == ()
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    assert_grads(model, grads(single))
    norms = [torch.empty_like(norm) for _ in range(dist.get_world_size())]
    dist.all_gather(norms, norm)
    assert all(torch.equal(norm, other) for other in norms)


@pytest.mark.promise(32)
@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "ddp"])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, math.inf])
def test_norm_over_sharded_and_plain_gradients(world2: World, kind: str, norm_type: float) -> None:
    world2(clip_prepared, kind, norm_type, 0.05)


@pytest.mark.promise(32)
def test_small_gradients_are_left_alone(world2: World) -> None:
    world2(clip_prepared, "fsdp", 2.0, 1e6)


@pytest.mark.promise(32)
def test_norm_on_a_two_by_two_mesh(world4: World) -> None:
    world4(clip_prepared, "hsdp", 2.0, 0.05)


def several_meshes(norm_type: float) -> None:
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


@pytest.mark.promise(32)
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_several_meshes_frozen_and_missing_gradients(world4: World, norm_type: float) -> None:
    world4(several_meshes, norm_type)


def non_finite(bad: float, norm_type: float) -> float:
    model, _ = prepared("fsdp")
    loss_of(model(mine(batch()[0]))).backward()
    if dist.get_rank() == 1:
        grad = model.head.weight.grad
        assert isinstance(grad, DTensor)
        grad.to_local()[0, 0] = bad
    return clip_grad_norm(model, 1.0, norm_type).item()


@pytest.mark.promise(32)
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_non_finite_norms_are_returned_on_every_rank(world2: World, norm_type: float) -> None:
    assert world2(non_finite, math.inf, norm_type) == [math.inf, math.inf]
    assert all(math.isnan(norm) for norm in world2(non_finite, math.nan, norm_type))


def between_forward_and_reshard(reshard: bool | int) -> None:
    model, single = prepared("fsdp", reshard)
    (x,) = batch()
    reference(single, [x])
    loss_of(model(mine(x))).backward()
    with torch.no_grad():
        model.eval()(mine(x))  # leaves gathered parameters registered
    expected = nn.utils.clip_grad_norm_(single.parameters(), 0.05)
    torch.testing.assert_close(clip_grad_norm(model, 0.05), expected, rtol=1e-6, atol=0)
    assert_grads(model, grads(single))


@pytest.mark.promise(103)
@pytest.mark.parametrize("reshard", [True, False, 1])
def test_clipping_after_an_evaluation(world2: World, reshard: bool | int) -> None:
    world2(between_forward_and_reshard, reshard)


def clip_values() -> None:
    model, single = prepared("fsdp")
    (x,) = batch()
    reference(single, [x])
    loss_of(model(mine(x))).backward()
    nn.utils.clip_grad_value_(single.parameters(), 0.01)
    clip_grad_value(model, 0.01)
    assert_grads(model, grads(single))


@pytest.mark.promise(32)
def test_clipping_by_value(world2: World) -> None:
    world2(clip_values)


@pytest.mark.promise(32)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_process_any_dtype(dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.zeros(3, dtype=dtype))
    parameter.grad = torch.tensor([3.0, 4.0, 0.0], dtype=dtype)
    norm = clip_grad_norm(parameter, 1.0)
    assert norm.item() == 5.0
    assert norm.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
    expected = torch.tensor([0.6, 0.8, 0.0], dtype=dtype)
    torch.testing.assert_close(parameter.grad, expected, rtol=1e-2, atol=0)


@pytest.mark.promise(32)
def test_nothing_to_clip() -> None:
    assert clip_grad_norm([], 1.0).item() == 0.0
    assert clip_grad_norm(nn.Linear(2, 2), 1.0).item() == 0.0


@pytest.mark.promise(32)
@pytest.mark.parametrize(("max_norm", "norm_type"), [(1.0, 0.0), (1.0, -2.0), (-1.0, 2.0)])
def test_impossible_norms_are_refused(max_norm: float, norm_type: float) -> None:
    with pytest.raises(ParallelismValueError, match="norm_type > 0 and max_norm >= 0"):
        clip_grad_norm(nn.Linear(2, 2), max_norm, norm_type)
