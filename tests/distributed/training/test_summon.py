"""Full parameters in place of shards: what is seen inside, and what is left behind."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from composer_dist.checkpoint import full_model_state
from composer_dist.distributed import parallelize_model
from composer_dist.distributed.training.summon import summon_full_params
from composer_dist.errors import ParallelismError, ParallelismRuntimeError
from tests.kit.compare import close, equal, fails_alike, full
from tests.kit.huggingface import logits, lora_llama
from tests.kit.meshes import BY_WORLD, PLACES, mesh_of
from tests.kit.toy import Stateful, sharded, six_tokens, stateful, trainable
from tests.kit.world import on_ranks

pytestmark = pytest.mark.promise(90)


def tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in state.items() if isinstance(value, Tensor)}


def state(model: torch.nn.Module) -> dict[str, Tensor]:
    return tensors(full_model_state(model, ranks="all"))


@pytest.mark.parametrize("options", [{}, {"offload_to_cpu": True}, {"writeback": False}])
@on_ranks(2)
def test_inside_are_plain_full_parameters(options: dict[str, bool]) -> None:
    model = sharded(stateful())
    before = list(model.parameters())
    with summon_full_params(model, **options):
        equal(*({n: p.detach() for n, p in each.named_parameters()} for each in (model, stateful())))
        assert {type(p) for p in model.parameters()} == {torch.nn.Parameter}
        assert model.head.weight is model.embed.weight
        assert not model.scale.requires_grad
        assert model.embed.weight.requires_grad
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))


@on_ranks(2)
def test_rank0_only_leaves_the_others_their_shards() -> None:
    model = sharded(stateful())
    with summon_full_params(model, rank0_only=True, writeback=False):
        assert {isinstance(p, DTensor) for p in model.parameters()} == {dist.get_rank() > 0}


@pytest.mark.parametrize("rank0_only", [False, True])
@pytest.mark.parametrize("writeback", [False, True])
@on_ranks(2)
def test_changes_are_kept_or_dropped_and_training_goes_on(writeback: bool, rank0_only: bool) -> None:
    model, reference = sharded(stateful()).eval(), stateful().eval()
    optimizers = [torch.optim.SGD(trainable(each), lr=0.1) for each in (model, reference)]

    def change(each: Stateful) -> None:
        with torch.no_grad():
            each.embed.weight.mul_(2)
            each.layers[1].up.weight.fill_(3)

    with summon_full_params(model, writeback=writeback, rank0_only=rank0_only):
        if not rank0_only or dist.get_rank() == 0:
            change(model)
    if writeback:
        change(reference)
    outputs = [each(six_tokens()) for each in (model, reference)]
    torch.testing.assert_close(*outputs)
    for output in outputs:
        output.logsumexp(-1).mean().backward()
    equal(state(model), tensors(reference.state_dict()))
    for optimizer in optimizers:
        optimizer.step()
    name = "layers.1.up.weight"
    torch.testing.assert_close(state(model)[name], reference.state_dict()[name])


@pytest.mark.parametrize("part", ["", "layers.1", "layers.1.up"])
@on_ranks(2)
def test_states_are_loaded_and_dtypes_converted_inside(part: str) -> None:
    model, reference = sharded(stateful()).eval(), stateful().eval()
    for each in (model, reference):
        with summon_full_params(each.get_submodule(part)):
            inside = each.get_submodule(part)
            inside.load_state_dict({name: one + 1 for name, one in inside.state_dict().items()})
            inside.to(torch.float32)
    outputs = [each(six_tokens()) for each in (model, reference)]
    torch.testing.assert_close(*outputs)
    equal(state(model), tensors(reference.state_dict()))
    outputs[0].sum().backward()


@on_ranks(2)
def test_a_leaf_and_without_recursion() -> None:
    model = stateful().eval()
    fully_shard(model.layers[1].down, mesh=mesh_of(1))
    leaf, block = sharded(model).layers[0].down, model.layers[1]

    def plain(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
        return {n: tuple(p.shape) for n, p in module.named_parameters() if not isinstance(p, DTensor)}

    with summon_full_params(leaf):
        assert plain(model) == {"layers.0.down.weight": (8, 5)}
        x = torch.ones(1, 5)
        torch.testing.assert_close(leaf(x), stateful().layers[0].down(x))
    with summon_full_params(model, recurse=False):
        assert list(plain(model)) == ["scale", "embed.weight"]
    for recurse, below in ((True, ["down.weight"]), (False, [])):
        with summon_full_params(block, recurse=recurse):
            assert list(plain(block)) == ["up.weight", "up.bias", "norm.weight", "norm.bias", *below]


@on_ranks(2)
def test_gradients_come_along_and_go_back() -> None:
    model, reference = sharded(stateful()).eval(), stateful().eval()
    for each in (model, reference):
        each(six_tokens()).logsumexp(-1).mean().backward()
    expected = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    with summon_full_params(model, with_grads=True):
        inside = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert list(inside) == list(expected)
        close(inside, expected)
        for grad in inside.values():
            grad.mul_(2)
    after = {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    close(after, {n: 2 * grad for n, grad in expected.items()})
    if dist.get_rank() == 1:
        model.embed.weight.grad = None
    text = "rank 0 has a gradient of embed.weight, and rank 1 has none"
    with fails_alike(ParallelismRuntimeError, text), summon_full_params(model, with_grads=True):
        pass


@pytest.mark.promise(103)
@pytest.mark.parametrize("reshard_after_forward", [True, False])
@on_ranks(2)
def test_after_an_eval_forward(reshard_after_forward: bool) -> None:
    model = sharded(stateful(), reshard_after_forward=reshard_after_forward).eval()
    reference = stateful().eval()
    with torch.no_grad():
        reference(six_tokens())
        model(six_tokens())
        with summon_full_params(model):
            model.embed.weight.zero_()
        reference.embed.weight.zero_()
    equal(state(model), tensors(reference.state_dict()))


@pytest.mark.parametrize(
    ("kind", "rank0_only", "text"),
    [
        ("forward", False, "forward of FSDPStateful"),
        ("shape", True, "layers.0.up.weight"),
        ("gradient", False, "layers.0.up.weight got a gradient inside of summon_full_params, where it would"),
        ("freeze", False, "requires_grad of layers.0.up.weight was changed inside of summon_full_params"),
    ],
)
@on_ranks(2)
def test_a_change_that_cannot_be_kept_is_refused_on_every_rank(
    kind: str, rank0_only: bool, text: str
) -> None:
    model = sharded(stateful()).eval()
    before = state(model)
    with (
        fails_alike(ParallelismError, text),
        summon_full_params(model, rank0_only=rank0_only),
        torch.no_grad(),
    ):
        if kind == "forward":
            model(six_tokens())
        elif kind == "gradient":
            model.layers[0].up.weight.grad = torch.ones_like(model.layers[0].up.weight)
        elif kind == "freeze":
            model.layers[0].up.weight.requires_grad_(False)
        elif dist.get_rank() == 0:
            model.layers[0].up.weight = torch.nn.Parameter(torch.ones(2, 2))
    equal(state(model), before)


def adapted_llama() -> Any:
    torch.manual_seed(3)
    return lora_llama().eval()


@pytest.mark.parametrize(("ranks", "names"), PLACES)
@on_ranks("ranks", timeout=180)
def test_on_every_mesh(ranks: int, names: list[str]) -> None:
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


def test_a_plain_model_is_left_alone() -> None:
    model = stateful()
    with summon_full_params(model), torch.no_grad():
        model.scale.fill_(2)
    assert torch.equal(model.scale, torch.full((8,), 2.0))


@on_ranks(2)
def test_a_rank_that_does_something_else_is_named() -> None:
    model = stateful()
    parallelize_model(model, "fsdp")
    with fails_alike(ParallelismRuntimeError, "summon_full_params"):
        if dist.get_rank() == 0:
            with summon_full_params(model):
                pass
        else:
            full_model_state(model)
