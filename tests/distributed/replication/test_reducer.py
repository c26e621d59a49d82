"""DDP in place: the same function and the same training as one process."""

import copy
from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any

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
from tests.kit.toy import Toy, built, train
from tests.kit.world import World

# The same training


def same_training(builds: list[Callable[[], nn.Module]], config: Any) -> None:
    for build in builds:
        done = assert_same_training(build, config)
        assert set(done.plan.plain) == {
            name for tie in [[n] for n, _ in done.model.named_parameters()] for name in tie
        }
        assert not done.plan.units


BUILDS = [models.M, models.tied, models.bert, models.scalar, models.dtypes]


@pytest.mark.promise(61)
def test_three_steps_equal_one_process_on_two_ranks(world2: World) -> None:
    world2(same_training, [*BUILDS, models.non_contiguous, models.parent_child], DDPConfig())


@pytest.mark.promise(61)
def test_three_steps_equal_one_process_on_four_ranks(world4: World) -> None:
    world4(same_training, [models.tied], {"mesh": {"dp_replicate": 4, "dp_shard": 1}, "ddp": {}})


@pytest.mark.promise(102)
def test_by_the_strategy_s_name(world2: World) -> None:
    world2(same_training, [models.M], "ddp")


@pytest.mark.promise(61)
def test_one_rank_is_enough(world1: World) -> None:
    world1(same_training, [models.tied], DDPConfig())


@pytest.mark.promise(61)
@pytest.mark.parametrize(
    "options",
    [
        {"static_graph": True},
        {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0001},
        {"activation_checkpointing": "composable"},
        {"activation_checkpointing": "composable", "static_graph": True},
        {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
def test_whatever_the_options(world2: World, options: dict[str, Any]) -> None:
    world2(same_training, [models.tied], ddp(**options))


def in_place() -> None:
    model = built()
    names, keys = list(dict(model.named_parameters())), list(model.state_dict())
    objects = [*model.parameters(), *model.buffers()]
    model.embed.weight.no_decay = True
    seen: list[Tensor] = []
    model.layers[0].up.weight.register_hook(seen.append)
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], 0.1, momentum=0.9)
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


@pytest.mark.promise(61)
def test_nothing_is_replaced_or_renamed(world2: World) -> None:
    world2(in_place)


# Weights


def filled(where: str, **options: Any) -> dict[str, Tensor]:
    rank = dist.get_rank()
    device = "meta" if where == "meta" or (where == "rank0" and rank) else "cpu"
    model = built(seed=rank if where == "different" else 0, device=device)
    optimizer = Adam([p for p in model.parameters() if p.requires_grad], 0.1)
    group = optimizer.param_groups[0]
    torch.manual_seed(0)
    parallelize_model(model, ddp(**options), optimizer)
    assert optimizer.param_groups[0] is group
    assert [id(p) for p in group["params"]] == [id(p) for p in model.parameters() if p.requires_grad]
    assert model.head.weight is model.embed.weight
    start = values(model)
    train(model, optimizer, 2)
    return start | {f"after {name}": value for name, value in values(model).items()}


def reference(model: nn.Module) -> dict[str, Tensor]:
    start = values(model)
    train(model, Adam([p for p in model.parameters() if p.requires_grad], 0.1), 2)
    return start | {f"after {name}": value for name, value in values(model).items()}


@pytest.mark.promise(61)
@pytest.mark.parametrize("transport", ["memory", "messages"])
def test_rank_0_s_weights_reach_ranks_on_meta(world2: World, transport: str) -> None:
    for found in world2(filled, "rank0", transport=transport):
        close(found, reference(built()))


@pytest.mark.promise(61)
def test_real_weights_are_compared_or_rank_0_s_count(world2: World) -> None:
    for found in world2(filled, "different", sync="rank0"):
        close(found, reference(built()))
    for text in world2(refused, "different"):
        assert "hold different values of embed.weight" in text


def refused(where: str) -> str:
    with pytest.raises(ParallelismError) as error:
        filled(where)
    return str(error.value)


@pytest.mark.promise(61)
def test_meta_everywhere_is_initialized_as_in_one_process(world2: World) -> None:
    model = built(device="meta")
    torch.manual_seed(0)
    meta_init(model)
    start = values(model)
    for found in world2(filled, "meta"):
        same({name: value for name, value in found.items() if name in start}, start)


def follows(steps: int) -> tuple[dict[str, Tensor], list[Any]]:
    model = built()
    optimizer = Adam([p for p in model.parameters() if p.requires_grad], 0.05)
    train(model, optimizer, steps, whole=True)
    groups = list(optimizer.param_groups)
    groups[0]["initial_lr"] = 0.05
    parallelize_model(model, ddp(), optimizer)
    assert all(a is b for a, b in zip(optimizer.param_groups, groups, strict=True))
    train(model, optimizer, 2, first=steps)
    return values(model), [float(optimizer.state[p]["step"]) for p in groups[0]["params"]]


@pytest.mark.promise(25, 83)
def test_the_optimizer_goes_on_with_its_state(world2: World) -> None:
    model = built()
    train(model, Adam([p for p in model.parameters() if p.requires_grad], 0.05), 3)
    for found, steps in world2(follows, 1):
        close(found, values(model))
        assert set(steps) == {3.0}


# Buffers


class Counting(nn.Module):
    """A batch norm, and a counter of its own on every rank, in a buffer of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(8, 4), nn.BatchNorm1d(4)
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.count[dist.get_rank() if dist.is_initialized() else 0] += 1
        out: Tensor = self.norm(self.up(x))
        return out


def buffers_as_in_ddp(broadcast: bool) -> None:
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


@pytest.mark.parametrize("broadcast", [True, False])
def test_buffers_are_broadcast_each_forward_as_in_ddp(world2: World, broadcast: bool) -> None:
    world2(buffers_as_in_ddp, broadcast)


# Frozen and thawed parameters


def thaws(**options: Any) -> None:
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


def test_parameters_frozen_and_thawed_later_are_followed(world2: World) -> None:
    world2(thaws)
    world2(thaws, gradient_as_bucket_view=True, static_graph=True)


# What is left to each rank, and evaluation


def left_alone(**options: Any) -> tuple[dict[str, Tensor], dict[str, bool], str]:
    model = built(seed=dist.get_rank())
    model._ddp_params_and_buffers_to_ignore = ["layers.1.down.weight"]
    ignored = ["row", nn.BatchNorm1d, "re:.*shift"]
    done = parallelize_model(model, ddp(ignored=ignored, sync="rank0", **options))
    with torch.set_grad_enabled(not options.get("evaluate_only")):
        output = model(torch.arange(4) + dist.get_rank())
    if output.requires_grad:
        output.square().mean().backward()
    averaged = {name: alike_one(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return values(model), averaged, done.plan.explain("layers.0.norm.weight")


def alike_one(tensor: Tensor) -> bool:
    both = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(both, tensor)
    return torch.equal(*both)


IGNORED = {"row", "shift", "layers.1.down.weight"}


@pytest.mark.promise(60)
@pytest.mark.parametrize("evaluate_only", [False, True])
def test_the_ignore_list_is_honored(world2: World, evaluate_only: bool) -> None:
    (first, averaged, text), (second, *_) = world2(left_alone, evaluate_only=evaluate_only)
    different = {name for name, value in first.items() if not torch.equal(value, second[name])}
    norms = {name for name in first if ".norm." in name}
    assert IGNORED < different <= IGNORED | norms
    assert "DDPConfig.ignored=BatchNorm1d leaves it to each rank" in text
    if evaluate_only:
        assert averaged == {}
    else:
        assert {name for name, equal in averaged.items() if not equal} == {
            name for name in averaged if name in IGNORED | norms
        }


def kwargs_reach_ddp() -> None:
    options = {
        "find_unused_parameters": True,
        "bucket_cap_mb": 3.0,
        "gradient_as_bucket_view": True,
        "broadcast_buffers": False,
        "skip_all_reduce_unused_params": True,
    }
    newer = {"batched_grad_copy": True}  # since torch 2.13
    newer = {k: v for k, v in newer.items() if k in signature(DistributedDataParallel).parameters}
    seen = []
    init = DistributedDataParallel.__init__

    @wraps(init)
    def record(self: Any, *args: Any, **given: Any) -> None:
        seen.append(given)
        init(self, *args, **given)

    DistributedDataParallel.__init__ = record  # type: ignore[method-assign]
    try:
        model = M()
        parallelize_model(model, ddp(options=newer, **options))
        model(torch.ones(2, 8)).sum().backward()
    finally:
        DistributedDataParallel.__init__ = init  # type: ignore[method-assign]
    (given,) = seen
    wanted = options | newer | {"init_sync": False}
    del wanted["broadcast_buffers"]  # has another name since torch 2.13
    assert {key: given[key] for key in wanted} == wanted


@pytest.mark.promise(60)
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
def test_it_wraps_once_with_the_given_options(world2: World) -> None:
    world2(kwargs_reach_ddp)


def evaluates() -> None:
    model = built(seed=dist.get_rank())
    cls = type(model)
    done = parallelize_model(model, ddp(evaluate_only=True, sync="rank0"))
    assert type(model) is cls
    assert "evaluate_only" in done.plan.explain("")
    assert alike(model)
    with torch.no_grad():
        model(torch.arange(4))
    with fails(ParallelismRuntimeError, "scale would get a gradient", "evaluate_only"):
        model(torch.arange(4))
    assert parallelize_model(model, ddp()).plan.replication.idle is None  # type: ignore[union-attr]
    train(model, SGD([p for p in model.parameters() if p.requires_grad], 0.1), 1)
    assert alike(model)
    torch.manual_seed(0)
    frozen = M().requires_grad_(False)
    assert "no parameter is trainable" in parallelize_model(frozen, ddp()).plan.explain("")
    frozen(torch.ones(2, 8))
    frozen[0].weight.requires_grad_()
    with fails(ParallelismRuntimeError, "0.weight would get a gradient", "no parameter is trainable"):
        frozen(torch.ones(2, 8))


@pytest.mark.promise(60)
def test_evaluation_only_synchronizes(world2: World) -> None:
    world2(evaluates)


def twice() -> None:
    model = M()
    parallelize_model(model, ddp())
    hooks = len(model._forward_hooks)
    for config in (ddp(), "fsdp"):
        with fails(TypeError, "The model is already replicated by DDP; prepare a model only once"):
            parallelize_model(model, config)
    assert len(model._forward_hooks) == hooks
    with fails(ParallelismTypeError, "0 is already replicated by DDP"):
        parallelize_model(nn.Sequential(model, nn.Linear(4, 4)), ddp())
    with fails(ParallelismTypeError, "The model is already wrapped in DistributedDataParallel", ".module"):
        parallelize_model(DistributedDataParallel(M()), ddp())
    sharded = M()
    parallelize_model(sharded, FSDP2Config())
    with fails(ParallelismTypeError, "is already sharded by FSDP2"):
        parallelize_model(sharded, ddp())


@pytest.mark.promise(61)
def test_a_second_preparation_is_a_type_error(world2: World) -> None:
    world2(twice)
