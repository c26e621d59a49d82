"""DDP in place: the same function and the same training as one process."""

import copy
from collections.abc import Callable
from inspect import signature
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam

from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.replicate import DDPConfig
from composer_dist.distributed import parallelize_model
from composer_dist.distributed.steps import meta_init
from composer_dist.errors import ParallelismError, ParallelismRuntimeError, ParallelismTypeError
from tests.kit import models
from tests.kit.compare import alike, assert_same_training, close, fails, same, values
from tests.kit.meshes import ddp, mine
from tests.kit.models import M
from tests.kit.toy import Toy, built, train, trainable
from tests.kit.world import on_ranks

pytestmark = pytest.mark.promise(104)

# The same training


BUILDS = [models.M, models.tied, models.bert, models.scalar, models.dtypes]
OPTIONS: list[dict[str, Any]] = [
    {"static_graph": True},
    {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0001},
    {"activation_checkpointing": "composable"},
    {"activation_checkpointing": "composable", "static_graph": True},
    {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
]


@pytest.mark.promise(61)
@pytest.mark.parametrize(
    ("ranks", "builds", "config"),
    [
        (2, [*BUILDS, models.non_contiguous, models.parent_child], DDPConfig()),
        (4, [models.tied], {"mesh": {"dp_replicate": 4, "dp_shard": 1}, "ddp": {}}),
        (1, [models.tied], DDPConfig()),
        pytest.param(2, [models.M], "ddp", marks=pytest.mark.promise(102)),
        *[(2, [models.tied], ddp(**options)) for options in OPTIONS],
    ],
)
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
@on_ranks("ranks")
def test_three_steps_equal_one_process(
    ranks: int, builds: list[Callable[[], nn.Module]], config: Any
) -> None:
    for build in builds:
        done = assert_same_training(build, config)
        assert set(done.plan.plain) == set(dict(done.model.named_parameters()))
        assert not done.plan.units


@pytest.mark.promise(61)
@on_ranks(2)
def test_nothing_is_replaced_or_renamed() -> None:
    model = built()
    names, keys = list(dict(model.named_parameters())), list(model.state_dict())
    objects = [*model.parameters(), *model.buffers()]
    model.embed.weight.no_decay = True
    seen: list[Tensor] = []
    model.layers[0].up.weight.register_hook(seen.append)
    optimizer = SGD(trainable(model), 0.1, momentum=0.9)
    done = parallelize_model(model, ddp(), optimizer)
    assert done.model is model
    assert isinstance(model, Toy)
    assert list(dict(model.named_parameters())) == names
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip([*model.parameters(), *model.buffers()], objects, strict=True))
    assert model.head.weight is model.embed.weight
    assert model.embed.weight.no_decay
    assert set(done.plain_parameters) == set(names)
    train(model, optimizer, 1)
    assert len(seen) == 1


# Weights


@pytest.mark.promise(61)
@pytest.mark.parametrize(
    ("where", "options"),
    [
        ("rank 0", {"transport": "memory"}),
        ("rank 0", {"transport": "messages"}),
        ("different", {"sync": "rank0"}),
        ("nowhere", {}),
    ],
)
@on_ranks(2)
def test_rank_0_s_weights_or_those_of_one_process_s_meta_init_count(
    where: str, options: dict[str, Any]
) -> None:
    rank = dist.get_rank()
    on_meta = where == "nowhere" or (where == "rank 0" and rank > 0)
    model = built(seed=rank if where == "different" else 0, device="meta" if on_meta else "cpu")
    single = built(device="meta" if where == "nowhere" else "cpu")
    optimizer = Adam(trainable(model), 0.1)
    group = optimizer.param_groups[0]
    torch.manual_seed(0)
    meta_init(single)
    torch.manual_seed(0)
    parallelize_model(model, ddp(**options), optimizer)
    assert optimizer.param_groups[0] is group
    assert [id(p) for p in group["params"]] == [id(p) for p in trainable(model)]
    assert model.head.weight is model.embed.weight
    same(values(model), values(single))
    train(model, optimizer, 2)
    train(single, Adam(trainable(single), 0.1), 2, whole=True)
    close(values(model), values(single))


@pytest.mark.promise(61)
@on_ranks(2)
def test_real_weights_are_compared() -> None:
    with fails(ParallelismError, "hold different values of embed.weight"):
        parallelize_model(built(seed=dist.get_rank()), ddp())


@pytest.mark.promise(25, 83)
@on_ranks(2)
def test_the_optimizer_goes_on_with_its_state() -> None:
    model, single = built(), built()
    optimizer = Adam(trainable(model), 0.05)
    train(model, optimizer, 1, whole=True)
    groups = list(optimizer.param_groups)
    groups[0]["initial_lr"] = 0.05
    parallelize_model(model, ddp(), optimizer)
    assert all(a is b for a, b in zip(optimizer.param_groups, groups, strict=True))
    train(model, optimizer, 2, first=1)
    train(single, Adam(trainable(single), 0.05), 3, whole=True)
    close(values(model), values(single))
    assert {float(optimizer.state[p]["step"]) for p in groups[0]["params"]} == {3.0}


# Buffers


class Counting(nn.Module):
    """A batch norm, and a counter of its own on every rank, in a buffer of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(8, 4), nn.BatchNorm1d(4)
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.count[dist.get_rank()] += 1
        out: Tensor = self.norm(self.up(x))
        return out


@pytest.mark.parametrize("broadcast", [True, False])
@on_ranks(2)
def test_buffers_are_broadcast_each_forward_as_in_ddp(broadcast: bool) -> None:
    model = built(Counting)
    theirs = DistributedDataParallel(copy.deepcopy(model))
    theirs.broadcast_buffers = broadcast
    parallelize_model(model, ddp(broadcast_buffers=broadcast))
    rank = dist.get_rank()
    torch.manual_seed(rank)
    for step in range(3):
        x = torch.randn(4, 8)
        for one in (model, theirs):
            one.zero_grad()
            one(x).square().sum().backward()
        same(dict(model.named_buffers()), dict(theirs.module.named_buffers()))
        counts = [step + 1, 0] if rank == 0 else [step, 1] if broadcast else [0, step + 1]
        assert model.count.tolist() == counts
        for ours, other in zip(model.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, other.grad)
        assert alike(model, lambda p: p.grad)
    assert (model.norm.running_mean == 0).sum() == 0


# Frozen and thawed parameters


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True, "static_graph": True}])
@on_ranks(2)
def test_parameters_frozen_and_thawed_later_are_followed(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = M()
    model[0].requires_grad_(False)
    single = copy.deepcopy(model)
    optimizers = [SGD(one.parameters(), 0.1) for one in (model, single)]
    done = parallelize_model(model, ddp(**options), optimizers[0])
    assert done.plan.plain["0.weight"].endswith("it is frozen")
    for step in range(6):
        if step in (2, 4):
            for one in (model, single):
                one[0].requires_grad_(step == 2)
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        model(mine(x)).square().mean().backward()
        single(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        close(values(model), values(single))
        assert alike(model)


# What is left to each rank, and evaluation


def differing(tensors: dict[str, Tensor | None]) -> set[str]:
    """The names of the tensors that are not the same on both ranks."""
    found = set()
    for name, tensor in tensors.items():
        if tensor is not None:
            both = [torch.empty_like(tensor) for _ in range(2)]
            dist.all_gather(both, tensor)
            found |= set() if torch.equal(*both) else {name}
    return found


IGNORED = {"row", "shift", "layers.1.down.weight"}


@pytest.mark.promise(60)
@pytest.mark.parametrize("evaluate_only", [False, True])
@on_ranks(2)
def test_the_ignore_list_is_honored(evaluate_only: bool) -> None:
    model = built(seed=dist.get_rank())
    model._ddp_params_and_buffers_to_ignore = ["layers.1.down.weight"]
    ignored = ["row", nn.BatchNorm1d, "re:.*shift"]
    done = parallelize_model(model, ddp(ignored=ignored, sync="rank0", evaluate_only=evaluate_only))
    with torch.set_grad_enabled(not evaluate_only):
        output = model(torch.arange(4) + dist.get_rank())
    if output.requires_grad:
        output.square().mean().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    left_alone = IGNORED | {name for name in values(model) if ".norm." in name}
    assert IGNORED < differing(values(model)) <= left_alone
    assert bool(grads) != evaluate_only
    assert differing(grads) == grads.keys() & left_alone
    explained = done.plan.explain("layers.0.norm.weight")
    assert "DDPConfig.ignored=BatchNorm1d leaves it to each rank" in explained


@pytest.mark.promise(60)
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
@on_ranks(2)
def test_it_wraps_once_with_the_given_options() -> None:
    options = {
        "find_unused_parameters": True,
        "bucket_cap_mb": 3.0,
        "gradient_as_bucket_view": True,
        "skip_all_reduce_unused_params": True,
    }
    newer = {"batched_grad_copy": True}  # since torch 2.13
    newer = {k: v for k, v in newer.items() if k in signature(DistributedDataParallel).parameters}
    init, model = DistributedDataParallel.__init__, M()
    with mock.patch.object(DistributedDataParallel, "__init__", autospec=True, side_effect=init) as made:
        parallelize_model(model, ddp(options=newer, broadcast_buffers=False, **options))
        model(torch.ones(2, 8)).sum().backward()
    made.assert_called_once()
    wanted = options | newer | {"init_sync": False}
    assert {key: made.call_args.kwargs[key] for key in wanted} == wanted


@pytest.mark.promise(60)
@on_ranks(2)
def test_evaluation_only_synchronizes() -> None:
    model = built(seed=dist.get_rank())
    cls = type(model)
    done = parallelize_model(model, ddp(evaluate_only=True, sync="rank0"))
    assert type(model) is cls
    copy.deepcopy(built())  # its class is left as it is
    assert "evaluate_only" in done.plan.explain("")
    assert alike(model)
    with torch.no_grad():
        model(torch.arange(4))
    with fails(ParallelismRuntimeError, "scale would get a gradient", "evaluate_only"):
        model(torch.arange(4))
    assert parallelize_model(model, ddp()).plan.replication.idle is None  # type: ignore[union-attr]
    train(model, SGD(trainable(model), 0.1), 1)
    assert alike(model)
    torch.manual_seed(0)
    frozen = M().requires_grad_(False)
    assert "no parameter is trainable" in parallelize_model(frozen, ddp()).plan.explain("")
    frozen(torch.ones(2, 8))
    frozen[0].weight.requires_grad_()
    with fails(ParallelismRuntimeError, "0.weight would get a gradient", "no parameter is trainable"):
        frozen(torch.ones(2, 8))


@pytest.mark.promise(61)
@on_ranks(2)
def test_a_second_preparation_is_a_type_error() -> None:
    model, sharded = M(), M()
    parallelize_model(model, ddp())
    hooks = len(model._forward_hooks)
    parallelize_model(sharded, FSDP2Config())
    again = "The model is already replicated by DDP; prepare a model only once"
    wrapped = "The model is already wrapped in DistributedDataParallel; pass the wrapped module (.module)"
    for given, config, text in (
        (model, ddp(), again),
        (model, "fsdp", again),
        (nn.Sequential(model, nn.Linear(4, 4)), ddp(), "0 is already replicated by DDP"),
        (DistributedDataParallel(M()), ddp(), wrapped),
        (sharded, ddp(), "is already sharded by FSDP2"),
    ):
        with fails(ParallelismTypeError, text):
            parallelize_model(given, config)
    assert len(model._forward_hooks) == hooks
