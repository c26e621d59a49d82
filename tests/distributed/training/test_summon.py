"""Full parameters in place of shards: what is seen inside, and what is left behind."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from composer_dist.checkpoint import full_model_state
from composer_dist.distributed import parallelize_model
from composer_dist.distributed.training.summon import summon_full_params
from composer_dist.errors import ParallelismError
from tests.kit.huggingface import logits, lora_llama
from tests.kit.meshes import BY_WORLD, PLACES
from tests.kit.toy import sharded, six_tokens, stateful
from tests.kit.world import World, run


def tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in state.items() if isinstance(value, Tensor)}


def full(model: torch.nn.Module) -> dict[str, Tensor]:
    return tensors(full_model_state(model, ranks="all"))


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def seen(**options: Any) -> tuple[dict[str, Tensor], list[str], bool, bool, bool]:
    model = sharded(stateful())
    before = list(model.parameters())
    with summon_full_params(model, **options):
        values = {n: p.detach().clone() for n, p in model.named_parameters()}
        kinds = sorted({type(p).__name__ for p in model.parameters()})
        tied = model.head.weight is model.embed.weight
        frozen = not model.scale.requires_grad and model.embed.weight.requires_grad
    identical = all(a is b for a, b in zip(before, model.parameters(), strict=True))
    return values, kinds, tied, frozen, identical


@pytest.mark.promise(90)
@pytest.mark.parametrize("options", [{}, {"offload_to_cpu": True}, {"writeback": False}])
def test_inside_are_plain_full_parameters(world2: World, options: dict[str, bool]) -> None:
    reference = {name: p.detach() for name, p in stateful().named_parameters()}
    for values, kinds, tied, frozen, identical in world2(seen, **options):
        assert same(values, reference)
        assert kinds == ["Parameter"]
        assert (tied, frozen, identical) == (True, True, True)


def seen_on_rank_0_only() -> list[bool]:
    model = sharded(stateful())
    with summon_full_params(model, rank0_only=True, writeback=False):
        return [isinstance(p, DTensor) for p in model.parameters()]


@pytest.mark.promise(90)
def test_rank0_only_leaves_the_others_their_shards(world2: World) -> None:
    first, second = world2(seen_on_rank_0_only)
    assert not any(first)
    assert all(second)


def changed(writeback: bool, rank0_only: bool) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    model = sharded(stateful()).eval()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with summon_full_params(model, writeback=writeback, rank0_only=rank0_only), torch.no_grad():
        if not rank0_only or torch.distributed.get_rank() == 0:
            model.embed.weight.mul_(2)
            model.layers[1].up.weight.fill_(3)
    outputs = model(six_tokens())
    outputs.logsumexp(-1).mean().backward()
    state = full(model)
    optimizer.step()
    return state, outputs.detach(), full(model)["layers.1.up.weight"]


@pytest.mark.promise(90)
@pytest.mark.parametrize("rank0_only", [False, True])
@pytest.mark.parametrize("writeback", [False, True])
def test_changes_are_kept_or_dropped_and_training_goes_on(
    world2: World, writeback: bool, rank0_only: bool
) -> None:
    reference = stateful().eval()
    if writeback:
        with torch.no_grad():
            reference.embed.weight.mul_(2)
            reference.layers[1].up.weight.fill_(3)
    expected = tensors(reference.state_dict())
    outputs = reference(six_tokens())
    outputs.logsumexp(-1).mean().backward()
    weight = reference.layers[1].up.weight
    for state, got, stepped in world2(changed, writeback, rank0_only):
        assert same(state, expected)
        torch.testing.assert_close(got, outputs.detach())
        torch.testing.assert_close(stepped, (weight - 0.1 * weight.grad).detach())


def leaf_and_root_only() -> tuple[list[tuple[int, ...]], Tensor, list[str], list[str]]:
    model = sharded(stateful()).eval()
    leaf = model.layers[0].down
    with summon_full_params(leaf):
        shapes = [tuple(p.shape) for p in leaf.parameters() if not isinstance(p, DTensor)]
        outputs = leaf(torch.ones(1, 5))
        others = [n for n, p in model.named_parameters() if not isinstance(p, DTensor)]
    with summon_full_params(model, recurse=False):
        own = [n for n, p in model.named_parameters() if not isinstance(p, DTensor)]
    return shapes, outputs, others, own


@pytest.mark.promise(90)
def test_a_leaf_and_without_recursion(world2: World) -> None:
    for shapes, outputs, others, own in world2(leaf_and_root_only):
        assert shapes == [(8, 5)]
        torch.testing.assert_close(outputs, stateful().layers[0].down(torch.ones(1, 5)))
        assert others == ["layers.0.down.weight"]
        assert own == ["scale", "embed.weight"]


def gradients() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = sharded(stateful()).eval()
    model(six_tokens()).logsumexp(-1).mean().backward()
    with summon_full_params(model, with_grads=True):
        inside = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(2)
    after = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
    return inside, after


@pytest.mark.promise(90)
def test_gradients_come_along_and_go_back(world2: World) -> None:
    reference = stateful().eval()
    reference(six_tokens()).logsumexp(-1).mean().backward()
    expected = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    for inside, after in world2(gradients):
        assert list(inside) == list(expected)
        for name, gradient in expected.items():
            torch.testing.assert_close(inside[name], gradient)
            torch.testing.assert_close(after[name], 2 * gradient)


def after_eval(reshard_after_forward: bool) -> dict[str, Tensor]:
    model = sharded(stateful(), reshard_after_forward=reshard_after_forward).eval()
    with torch.no_grad():
        model(six_tokens())
        with summon_full_params(model):
            model.embed.weight.zero_()
    return full(model)


@pytest.mark.promise(103)
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_after_an_eval_forward(world2: World, reshard_after_forward: bool) -> None:
    reference = stateful().eval()
    reference(six_tokens())
    torch.nn.init.zeros_(reference.embed.weight)
    for state in world2(after_eval, reshard_after_forward):
        assert same(state, tensors(reference.state_dict()))


def misuse(kind: str, rank0_only: bool) -> tuple[str, bool]:
    model = sharded(stateful()).eval()
    before = full(model)

    def misused() -> None:
        with summon_full_params(model, rank0_only=rank0_only), torch.no_grad():
            if kind == "forward":
                model(six_tokens())
            elif torch.distributed.get_rank() == 0:
                model.layers[0].up.weight = torch.nn.Parameter(torch.ones(2, 2))

    with pytest.raises(ParallelismError) as failure:
        misused()
    return str(failure.value), same(before, full(model))


@pytest.mark.promise(90)
@pytest.mark.parametrize(("kind", "rank0_only"), [("forward", False), ("shape", True)])
def test_a_change_that_cannot_be_kept_is_refused_on_every_rank(
    world2: World, kind: str, rank0_only: bool
) -> None:
    (text, untouched), other = world2(misuse, kind, rank0_only)
    assert other == (text, True)
    assert untouched
    assert ("forward of FSDPStateful" if kind == "forward" else "layers.0.up.weight") in text


def summoned_on(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    for name in names:
        model, reference = adapted_llama(), adapted_llama()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parallelize_model(model, BY_WORLD[name](), optimizer)
        held = {key: id(value) for key, value in model.named_parameters()}
        with summon_full_params(model):
            for (key, value), other in zip(model.named_parameters(), reference.parameters(), strict=True):
                assert torch.equal(value, other), key
                value.data.mul_(0.5)
        for other in reference.parameters():
            other.data.mul_(0.5)
        for _ in range(2):  # the changes survive forwards
            torch.testing.assert_close(logits(model), logits(reference), rtol=1e-5, atol=1e-5)
        assert held == {key: id(value) for key, value in model.named_parameters()}
        assert {id(p) for group in optimizer.param_groups for p in group["params"]} <= set(held.values())


def adapted_llama() -> Any:
    torch.manual_seed(3)
    return lora_llama().eval()


@pytest.mark.promise(90)
@pytest.mark.parametrize(("ranks", "names"), PLACES)
def test_on_every_mesh(ranks: int, names: list[str]) -> None:
    run(summoned_on, ranks, names, timeout=180)


@pytest.mark.promise(90)
def test_a_plain_model_is_left_alone() -> None:
    model = stateful()
    with summon_full_params(model), torch.no_grad():
        model.scale.fill_(2)
    assert torch.equal(model.scale, torch.full((8,), 2.0))
