"""DDP in place: the same function and the same training as one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam

from composer_dist.distributed import parallelize_model
from composer_dist.distributed.config import DDPConfig, ParallelismConfig
from composer_dist.distributed.steps import meta_init
from composer_dist.errors import ParallelismError
from tests.conftest import World
from tests.distributed import structures
from tests.distributed.preparable import Toy, built, close, same, train, values
from tests.distributed.structures import assert_same_training


def ddp(**options: Any) -> ParallelismConfig:
    """DDP on every rank; what is no field of `DDPConfig` goes beside it."""
    own = {key: options.pop(key) for key in list(options) if key in DDPConfig.__dataclass_fields__}
    return ParallelismConfig(ddp=DDPConfig(**own), bucket_bytes=512, **options)


def alike(model: nn.Module, part: Callable[[Tensor], Tensor | None] = lambda p: p.detach()) -> bool:
    """Whether all ranks hold the same values."""
    flat = torch.cat([value.flatten().double() for p in model.parameters() if (value := part(p)) is not None])
    everywhere = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, flat)
    return all(torch.equal(one, everywhere[0]) for one in everywhere)


def mine(x: Tensor) -> Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()]


@contextmanager
def fails(kind: type[BaseException], *texts: str) -> Iterator[None]:
    with pytest.raises(kind) as caught:
        yield
    for text in texts:
        assert text in str(caught.value), str(caught.value)


# The same training


def same_training(builds: list[Callable[[], nn.Module]], config: Any) -> None:
    for build in builds:
        done = assert_same_training(build, config)
        assert set(done.plan.plain) == {
            name for tie in [[n] for n, _ in done.model.named_parameters()] for name in tie
        }
        assert not done.plan.units


BUILDS = [structures.M, structures.tied, structures.bert, structures.scalar, structures.dtypes]


def test_p61_three_steps_equal_one_process_on_two_ranks(world2: World) -> None:
    world2(same_training, [*BUILDS, structures.non_contiguous, structures.parent_child], DDPConfig())


def test_p61_three_steps_equal_one_process_on_four_ranks(world4: World) -> None:
    world4(same_training, [structures.tied], {"mesh": {"dp_replicate": 4, "dp_shard": 1}, "ddp": {}})


def test_p61_one_rank_is_enough(world1: World) -> None:
    world1(same_training, [structures.tied], DDPConfig())


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
def test_p61_whatever_the_options(world2: World, options: dict[str, Any]) -> None:
    world2(same_training, [structures.tied], ddp(**options))


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


def test_p61_nothing_is_replaced_or_renamed(world2: World) -> None:
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


@pytest.mark.parametrize("transport", ["memory", "messages"])
def test_p61_rank_0_s_weights_reach_ranks_on_meta(world2: World, transport: str) -> None:
    for found in world2(filled, "rank0", transport=transport):
        close(found, reference(built()))


def test_p61_real_weights_are_compared_or_rank_0_s_count(world2: World) -> None:
    for found in world2(filled, "different", sync="rank0"):
        close(found, reference(built()))
    for text in world2(refused, "different"):
        assert "hold different values of embed.weight" in text


def refused(where: str) -> str:
    with pytest.raises(ParallelismError) as error:
        filled(where)
    return str(error.value)


def test_p61_meta_everywhere_is_initialised_as_in_one_process(world2: World) -> None:
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


def test_p25_p83_the_optimizer_goes_on_with_its_state(world2: World) -> None:
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


# Gradients


def accumulates() -> None:
    torch.manual_seed(3)
    model, single = M(), M()
    single.load_state_dict(model.state_dict())
    batches = torch.randn(3, 8, 8)
    parallelize_model(model, ddp())
    with no_sync(model):
        for x in batches[:2]:
            model(mine(x)).square().mean().backward()
    assert not alike(model, lambda p: p.grad)
    model(mine(batches[2])).square().mean().backward()
    for x in batches:
        single(x).square().mean().backward()
    grads_equal(model, single)
    norm = clip_grad_norm(model, 0.01)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(single.parameters(), 0.01))
    grads_equal(model, single)
    with no_sync(model, enabled=False):
        model(mine(batches[0])).square().mean().backward()
    single(batches[0]).square().mean().backward()
    grads_equal(model, single)
    with no_sync(model):  # a forward inside, its backward outside
        loss = model(mine(batches[1])).square().mean()
    loss.backward()
    single(batches[1]).square().mean().backward()
    grads_equal(model, single)


def grads_equal(model: nn.Module, single: nn.Module) -> None:
    expected = dict(single.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, expected[name].grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_p33_accumulation_and_clipping_equal_the_full_batch(world2: World) -> None:
    world2(accumulates)


def composers_table() -> dict[str, Any]:
    found = {}
    for strategy in DDPSyncStrategy:
        model = Choices()
        parallelize_model(model, ddp(find_unused_parameters=True))
        seen = []
        for microbatch in range(2):
            with ddp_sync_context(model, microbatch == 1, strategy):
                (model(microbatch) - (dist.get_rank() + 1)).square().sum().div(2).backward()
                seen.append(gradients(model))
        found[str(strategy)] = [*seen, gradients(model)]
    return found


def test_composers_table_of_gradients_holds_for_a_prepared_model(world2: World) -> None:
    assert world2(composers_table)[0] == EXPECTED


class Branches(nn.Module):
    """Uses its second branch only where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor, both: bool = False) -> Tensor:
        out: Tensor = self.first(x)
        return out + self.second(x) if both else out


def unused() -> None:
    torch.manual_seed(0)
    model = Branches()
    parallelize_model(model, ddp())
    x = torch.randn(4, 8)
    model(x).sum().backward()
    with fails(RuntimeError, "second.weight, second.bias", "find_unused_parameters=True", "2 of 4") as error:
        model(x)
    model = Branches()
    single = copy.deepcopy(model)
    parallelize_model(model, ddp(find_unused_parameters=True))
    for both in (False, True, False):
        for one, batch in ((model, mine(x)), (single, x)):
            one.zero_grad()
            one(batch, both).square().mean().backward()
        if both:
            grads_equal(model, single)
        assert (model.second.weight.grad is None) == (not both)


def test_p64_unused_parameters_are_named(world2: World) -> None:
    world2(unused)


def chained() -> tuple[type, type | None, str]:
    model = Branches()
    parallelize_model(model, ddp())
    model(torch.ones(4, 8)).sum().backward()
    try:
        model(torch.ones(4, 8))
    except RuntimeError as error:
        return type(error), type(error.__cause__), str(error.__cause__)
    raise AssertionError


def test_p64_the_original_error_is_chained_and_its_type_kept(world2: World) -> None:
    for kind, cause, text in world2(chained):
        assert issubclass(kind, RuntimeError)
        assert cause is RuntimeError
        assert "Expected to have finished reduction in the prior iteration" in text


def hints() -> list[str]:
    import warnings

    found = []
    for options, pattern in (
        ({}, (True, True, True)),
        ({"find_unused_parameters": True}, (False, False, False)),
        ({"find_unused_parameters": True}, (False, True, False)),
        ({"static_graph": True}, (True, True, True)),
        ({}, (True,)),
    ):
        done = parallelize_model(Branches(), ddp(**options))
        for both in pattern:
            done.model(torch.ones(4, 8), both).sum().backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            done.close()
            done.close()
        found.append([str(one.message) for one in caught])
    return found


def test_p65_a_constant_graph_is_hinted_at_once_when_training_ends(world2: World) -> None:
    first, second = world2(hints)
    assert [len(texts) for texts in first] == [1, 1, 0, 0, 0]
    assert "static_graph=True" in first[0][0]
    assert second == [[]] * 5


# Manual optimisation


class Manual(nn.Module):
    """Its step is its forward: two losses, two backwards, optionally a step after each."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.optimizer: torch.optim.Optimizer | None = None
        self.checks: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        losses = []
        for head in (self.left, self.right):
            loss = head(self.trunk(x).tanh()).square().mean()
            loss.backward()
            if dist.is_initialized():
                self.checks.append(alike(self, lambda p: p.grad))
            if self.optimizer is not None:
                self.optimizer.step()
                self.optimizer.zero_grad()
            losses.append(loss)
        return torch.stack(losses)


def manual(options: dict[str, Any], detached: bool) -> None:
    torch.manual_seed(5)
    model = Manual()
    single = copy.deepcopy(model)
    single.optimizer, model.optimizer = SGD(single.parameters(), 0.5), SGD(model.parameters(), 0.5)
    parallelize_model(model, ddp(**options), model.optimizer)
    for step in range(3):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        found = model(mine(x))
        before = [p.detach().clone() for p in single.parameters()]
        world, dist_is = dist.is_initialized, dist.is_initialized
        single_step(single, x)
        assert any(not torch.equal(a, b) for a, b in zip(before, single.parameters(), strict=True))
        close(values(model), values(single), rtol=1e-4)
    assert model.checks == [True] * 6
    del found, world, dist_is


def single_step(single: nn.Module, x: Tensor) -> None:
    for head in (single.left, single.right):
        head(single.trunk(x).tanh()).square().mean().backward()
        single.optimizer.step()
        single.optimizer.zero_grad()


@pytest.mark.parametrize("static_graph", [False, True])
def test_p66_two_backwards_and_steps_inside_of_a_forward(world2: World, static_graph: bool) -> None:
    world2(manual, {"static_graph": static_graph}, False)
