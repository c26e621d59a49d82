"""Post-local SGD against the same arithmetic in one process."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, TensorDataset

from composer_dist.checkpoint import load_checkpoint, save_checkpoint
from composer_dist.config.replicate import DDPConfig
from composer_dist.distributed import no_sync, parallelize_model, plan_parallelism
from composer_dist.distributed.replication.hooks import LocalSGD
from composer_dist.errors import ParallelismValueError
from tests.kit import models
from tests.kit.compare import fails
from tests.kit.training import classifier, fitted, loader, points
from tests.kit.world import World, on_ranks

pytestmark = pytest.mark.promise(63)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def flat(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def batch(step: int) -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(step))


def local_steps(steps: int, period: int, microbatches: int = 1, **options: Any) -> list[Tensor]:
    """This rank's parameters after each step."""
    torch.manual_seed(1)
    model = models.M()
    optimizer = sgd(model)
    config = DDPConfig(
        comm_hook="post_local_sgd", averaging_period=period, comm_hook_options={"group_size": 1, **options}
    )
    parallelize_model(model, config, optimizer)
    rank, world = dist.get_rank(), dist.get_world_size()
    seen = []
    for step in range(steps):
        for index, x in enumerate(batch(step).chunk(world)[rank].chunk(microbatches)):
            with no_sync(model, enabled=index < microbatches - 1):
                (model(x).square().mean() / microbatches).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(flat(model))
    return seen


def expected(steps: int, period: int, start: int, world: int) -> list[list[Tensor]]:
    """Step and rank to parameters, every rank being a model in this process."""
    torch.manual_seed(1)
    copies = [models.M()]
    copies += [copy.deepcopy(copies[0]) for _ in range(world - 1)]
    optimizers = [sgd(model) for model in copies]
    seen = []
    for step in range(steps):
        for model, x in zip(copies, batch(step).chunk(world), strict=True):
            model(x).square().mean().backward()
        if step < start:
            for same in zip(*(model.parameters() for model in copies), strict=True):
                mean = torch.stack([p.grad for p in same]).mean(0)
                for p in same:
                    p.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step >= start and (step - start + 1) % period == 0:
            with torch.no_grad():
                for same in zip(*(model.parameters() for model in copies), strict=True):
                    mean = torch.stack(list(same)).mean(0)
                    for p in same:
                        p.copy_(mean)
        seen.append([flat(model) for model in copies])
    return seen


@pytest.mark.parametrize(("start", "microbatches"), [(0, 1), (2, 1), (0, 2)])
def test_parameters_differ_after_an_odd_local_step_and_agree_after_an_even_one(
    world2: World, start: int, microbatches: int
) -> None:
    found = world2(local_steps, 5, 2, microbatches, start_localSGD_iter=start)
    reference = expected(5, 2, start, 2)
    for step, (first, second) in enumerate(zip(*found, strict=True)):
        torch.testing.assert_close(first, reference[step][0])
        torch.testing.assert_close(second, reference[step][1])
        is_odd_local_step = step >= start and (step - start) % 2 == 0
        assert torch.equal(first, second) != is_odd_local_step


def test_groups_go_on_averaging_their_gradients(world4: World) -> None:
    found = [after for (after,) in world4(local_steps, 1, 2, group_size=2)]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[2], found[3])
    assert not torch.equal(found[0], found[2])


@on_ranks(4)
def test_a_mesh_of_some_ranks_makes_groups_of_its_own() -> None:
    """The ranks outside do nothing."""
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp_replicate",))
    rank = dist.get_rank()
    if rank < 2:
        state = LocalSGD(mesh.get_group(), 2, group_size=1)
        state.next_backward()
        assert dist.get_process_group_ranks(state.group) == [rank]


@on_ranks(2)
def test_a_checkpoint_between_two_averages_has_the_mean_with_which_training_continues(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = models.M()
    optimizer = sgd(model)
    options = {"group_size": 1}
    config = DDPConfig(comm_hook="post_local_sgd", averaging_period=3, comm_hook_options=options)
    parallelize_model(model, config, optimizer)
    model(batch(dist.get_rank())).square().mean().backward()
    optimizer.step()
    everywhere = [torch.empty_like(flat(model)) for _ in range(2)]
    dist.all_gather(everywhere, flat(model))
    mean = torch.stack(everywhere).mean(0)
    assert not torch.equal(*everywhere)
    save_checkpoint(tmp_path / "c", {"model": model})
    torch.testing.assert_close(flat(model), mean)
    other = models.M()
    parallelize_model(other, DDPConfig())
    load_checkpoint(tmp_path / "c", {"model": other})
    assert torch.equal(flat(other), flat(model))


def alone(part: TensorDataset) -> Tensor:
    """The classifier's parameters after an epoch over a part of the data."""
    model = classifier()
    optimizer = sgd(model)
    for pair in DataLoader(part, 4):
        model.loss(model(pair), pair).backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


@pytest.mark.promise(98)
@on_ranks(2)
def test_evaluations_and_the_end_of_a_fit_average_first() -> None:
    parts = [TensorDataset(*points()[:8]), TensorDataset(*points()[4:])]
    trainer, log = fitted(
        train_dataloader=DataLoader(parts[dist.get_rank()], 4),
        eval_dataloader=loader(),
        optimizers=sgd,
        parallelism_config=DDPConfig(
            comm_hook="post_local_sgd", averaging_period=9, comm_hook_options={"group_size": 1}
        ),
        device="cpu",
        check_sampler=False,
    )
    mean = torch.stack([alone(part) for part in parts]).mean(0)
    torch.testing.assert_close(flat(trainer.state.model), mean)
    (evaluated,) = log.values("loss/eval/total")
    assert trainer.eval(loader())["loss/eval/total"] == pytest.approx(evaluated)


@on_ranks(2)
def test_parameters_that_are_left_to_each_rank_are_not_averaged() -> None:
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    config = DDPConfig(ignored="1", comm_hook="post_local_sgd", averaging_period=1)
    parallelize_model(model, config, optimizer)
    with torch.no_grad():
        model[1].weight.fill_(rank)
    model(torch.ones(1, 2) * (rank + 1)).sum().backward()
    expected = model[1].weight - 0.1 * model[1].weight.grad
    optimizer.step()
    assert torch.equal(model[1].weight, expected)
    everywhere = [torch.empty(2, 2) for _ in range(2)]
    dist.all_gather(everywhere, model[0].weight.detach())
    assert torch.equal(*everywhere)


def zero_redundancy(model: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, when it is imported
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)


def no_optimizer(model: nn.Module) -> None:
    return None


@pytest.mark.parametrize(
    ("options", "optimizer", "text"),
    [
        ({}, zero_redundancy, "cannot average the parameters of a ZeroRedundancyOptimizer"),
        ({}, no_optimizer, "pass optimizer="),
        ({"group_size": 3}, sgd, "group_size=3 does not divide the 2 ranks"),
    ],
)
@on_ranks(2)
def test_what_cannot_be_averaged_is_refused(options: dict[str, int], optimizer: Any, text: str) -> None:
    model = models.M()
    config = DDPConfig(comm_hook="post_local_sgd", averaging_period=2, comm_hook_options=options)
    with fails(ParallelismValueError, text):
        parallelize_model(model, config, optimizer(model))


def test_a_period_is_needed_and_needs_local_steps() -> None:
    model = models.M()
    with pytest.raises(ParallelismValueError, match="needs averaging_period"):
        plan_parallelism(model, DDPConfig(comm_hook="post_local_sgd"), world_size=2)
    plan = plan_parallelism(model, DDPConfig(averaging_period=2), world_size=2)
    assert "averaging_period=2 is ignored" in plan.warnings[0]


@on_ranks(2)
def test_a_period_without_post_local_sgd_warns() -> None:
    with pytest.warns(UserWarning, match="averaging_period=2 is ignored") as caught:
        parallelize_model(models.M(), DDPConfig(averaging_period=2, comm_hook="fp16"))
    assert len(caught) == 1
