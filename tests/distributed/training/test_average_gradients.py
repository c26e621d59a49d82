"""Means over ranks in few collectives; plain parameters against one process on the full batch."""

import copy
import gc
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from composer_dist import _torch
from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.distributed import parallelize_model
from composer_dist.distributed.training import average_gradients as averaging
from composer_dist.distributed.training.average_gradients import average_plain_gradients
from composer_dist.distributed.training.gradients import no_sync
from composer_dist.errors import ParallelismRuntimeError, ParallelismTypeError
from tests.kit.gradients import Toy, assert_grads, batch, collectives, grads, loss_of, prepared, reference
from tests.kit.meshes import ddp, mine
from tests.kit.world import on_ranks

pytestmark = pytest.mark.promise(94)


@on_ranks(2)
def test_tensors_of_any_layout_and_dtype_in_buckets() -> None:
    turned = torch.arange(4.0).reshape(2, 2).t()
    own = [torch.ones(3, 2), torch.tensor(2.0), torch.ones(5).double()]
    tensors = [*(dist.get_rank() * value for value in own), turned + dist.get_rank()]
    with (
        mock.patch.object(averaging, "_BUCKET", 24),
        mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as calls,
    ):
        averaging.average(tensors, None)
    for found, expected in zip(tensors, [*(value / 2 for value in own), turned + 0.5], strict=True):
        torch.testing.assert_close(found, expected)
    assert calls.call_count == 4


@on_ranks(2)
def test_unused_parameters_count_as_zero_where_any_rank_used_them() -> None:
    rank = dist.get_rank()
    everywhere, somewhere, nowhere = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    table = nn.Embedding(3, 2, sparse=True)
    everywhere.grad = torch.full((2,), 1.0 + rank)
    if rank == 1:
        somewhere.grad = torch.ones(2)
    table(torch.tensor([rank])).sum().backward()
    averaging.average_gradients([everywhere, somewhere, nowhere, table.weight])
    assert everywhere.grad.tolist() == [1.5, 1.5]
    assert somewhere.grad.tolist() == [0.5, 0.5]
    assert nowhere.grad is None
    assert table.weight.grad.tolist() == [[0.5, 0.5], [0.5, 0.5], [0.0, 0.0]]


@pytest.mark.parametrize(("kind", "ranks"), [("fsdp", 2), ("hsdp", 2), ("hsdp", 4)])
@on_ranks("ranks")
def test_scalars_and_unsharded_parameters_are_averaged_once_a_backward(kind: str, ranks: int) -> None:
    model, single = prepared(kind)
    for x in batch(3):  # each backward synchronizes what is accumulated so far
        with collectives() as calls:
            loss_of(model(mine(x))).backward()
        dims = 1 if kind == "fsdp" or ranks == 2 else 2
        hsdp_units = 3 if kind == "hsdp" else 0
        assert calls.count("all_reduce") == dims + hsdp_units
        assert_grads(model, reference(single, [x]))


@on_ranks(2)
def test_unused_here_counts_as_zero_and_unused_everywhere_stays_none() -> None:
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


@on_ranks(2)
def test_several_forwards_one_backward_and_the_reverse() -> None:
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


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_averaging_next_to_activation_checkpointing(reshard: bool) -> None:
    model, single = prepared("fsdp", reshard, recompute=True)
    batches = batch(2)
    with no_sync(model):
        loss_of(model(mine(batches[0]))).backward()
    loss_of(model(mine(batches[1]))).backward()
    assert_grads(model, reference(single, batches))


class _Returns(nn.Module):
    """open_clip's models return a parameter that no unit shards."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.bias = nn.Linear(4, 4), nn.Parameter(torch.tensor(-1.0))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, nn.Parameter]:
        return self.linear(x), self.bias


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
@on_ranks(2)
def test_a_parameter_that_every_forward_returns_is_hooked_once(kind: str) -> None:
    """Each forward added hooks to it, and steps became slower and slower."""
    model, single = _Returns(), _Returns()
    parallelize_model(model, ddp() if kind == "ddp" else FSDP2Config())
    before, counts = weakref.ref(model), []
    x = torch.arange(8.0).view(2, 4)
    for _ in range(4):
        outputs, bias = model(mine(x))
        assert bias is model.bias
        (outputs * bias).square().mean().backward()
        counts.append(len(_torch.gradient_hooks(bias)))
    outputs, bias = single(x)
    (outputs * bias).square().mean().mul(4).backward()
    assert_grads(model, grads(single))
    assert counts == [counts[0]] * 4
    del model, outputs, bias
    gc.collect()
    assert before() is None


@on_ranks(2)
def test_a_failed_backward_does_not_stop_the_next_one_and_remove_does() -> None:
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


def _bare_forward(self: Toy, x: torch.Tensor) -> torch.Tensor:
    return self.blocks[0].gain * x


@on_ranks(2)
def test_one_all_reduce_per_dtype_and_none_for_frozen_parameters() -> None:
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


@pytest.mark.promise(85)
@on_ranks(2)
def test_a_gradient_that_bypasses_the_root_is_an_error() -> None:
    model, _ = prepared("fsdp")
    x = mine(batch()[0])
    with pytest.raises(ParallelismRuntimeError, match=r"'adapter.weight' but no output"):
        model.adapter(x).sum().backward()
    with no_sync(model):
        model.adapter(x).sum().backward()


@on_ranks(2)
def test_sharded_parameters_are_refused() -> None:
    model = fully_shard(nn.Linear(4, 4))
    with pytest.raises(ParallelismTypeError, match="weight, bias are DTensors"):
        average_plain_gradients(model, dict(model.named_parameters()), None)


def test_one_process_needs_no_group() -> None:
    model = Toy()
    average_plain_gradients(model, dict(model.named_parameters()), None)
    single = copy.deepcopy(model)
    loss_of(model(batch()[0])).backward()
    assert_grads(model, reference(single, batch()))
    model.adapter(batch()[0]).sum().backward()  # no ranks, nothing to disagree about


@pytest.mark.promise(104)
@on_ranks(2)
def test_another_model_is_compiled_while_gradients_wait() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    parallelize_model(model, ddp())
    x = torch.ones(1, 3)
    with no_sync(model):
        model(x).sum().backward()
    model[0].weight.grad.zero_()  # type: ignore[union-attr]
    other = torch.compile(nn.Linear(3, 2), backend="aot_eager")
    other(x).sum().backward()
    assert other.weight.grad.tolist() == [[1.0] * 3] * 2  # type: ignore[union-attr]
    model(x).sum().backward()
    assert model[0].weight.grad.tolist() == [[1.0] * 3] * 2  # type: ignore[union-attr]
