"""The optimizer follows its parameters: groups, hyperparameters, state and pending gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composer_dist.config.rule import Rule
from composer_dist.distributed import parallelize_model
from composer_dist.distributed.optimizers.check import check_optimizers, forgotten_optimizers
from composer_dist.errors import ParallelismValueError
from composer_dist.structure.structure import read_structure
from tests.kit.compare import close, full, same, values
from tests.kit.meshes import config
from tests.kit.toy import Toy, built, tokens, train
from tests.kit.world import run

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "SGD-momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "Adam-foreach-off": lambda p: torch.optim.Adam(p, 0.01, foreach=False),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1, initial_accumulator_value=0.25),
    "Adadelta": lambda p: torch.optim.Adadelta(p, 1.0),
    "Adamax": lambda p: torch.optim.Adamax(p, 0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, 0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, 0.1, t0=1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "Muon": lambda p: torch.optim.Muon([x for x in p if x.ndim == 2], 0.01),
}


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


@pytest.mark.promise(25)
@pytest.mark.parametrize("before", [0, 1], ids=["fresh", "after-a-step"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_goes_on_as_if_nothing_had_been_sharded(name: str, before: int) -> None:
    model = built()
    optimizer = OPTIMIZERS[name](trainable(model))
    train(model, optimizer, before + 3)
    expected = values(model), state_of(model, optimizer)
    for found in run(goes_on, 2, name, before):
        assert found["types"] == {"row": DTensor, "scale": nn.Parameter}
        # Muon orthogonalizes in bfloat16, where another order of sums is another result.
        atol = 1e-3 if name == "Muon" else 1e-6
        close(found["values"], expected[0], atol=atol)
        close(found["state"], expected[1], rtol=1e-4, atol=atol)


def goes_on(name: str, before: int) -> dict[str, Any]:
    model = built()
    optimizer = OPTIMIZERS[name](trainable(model))
    train(model, optimizer, before, whole=True)
    old = {id(p) for p in trainable(model)}
    parallelize_model(model, config(), optimizer)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held.isdisjoint(old - {id(model.scale)})
    assert held <= {id(p) for p in model.parameters()}
    train(model, optimizer, 3, first=before)
    return {
        "types": {"row": type(model.row.data), "scale": type(model.scale)},
        "values": values(model),
        "state": state_of(model, optimizer),
    }


def state_of(model: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    names = {p: name for name, p in model.named_parameters()}
    return {
        f"{names[p]}/{key}": full(torch.as_tensor(value))
        for p, state in optimizer.state.items()
        for key, value in state.items()
    }


def test_every_optimizer_of_torch_is_either_followed_or_refused() -> None:
    public = {
        name
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
    }
    assert public == {name.split("-")[0] for name in OPTIMIZERS} | set(REFUSED)


REFUSED: dict[str, Callable[[Any], Optimizer]] = {
    "LBFGS": lambda p: torch.optim.LBFGS(p),
    "SparseAdam": lambda p: torch.optim.SparseAdam(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
}


@pytest.mark.promise(25)
@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_that_cannot_step_on_shards_are_refused_by_name(name: str) -> None:
    results = run(refused, 2, name)
    assert results[0] == results[1]
    assert results[0].startswith(
        f"{name} cannot step on sharded parameters (embed.weight, layers.0.up.weight"
    )


def refused(name: str) -> str:
    model = built()
    before = list(model.parameters())
    text = refusal(parallelize_model, model, config(), REFUSED[name](trainable(model)))
    assert [id(p) for p in model.parameters()] == [id(p) for p in before]
    assert type(model) is Toy
    return text


@pytest.mark.promise(25)
@pytest.mark.parametrize("name", ["Rprop", "Adafactor"])
def test_they_may_hold_replicated_parameters(name: str) -> None:
    model = built()
    optimizer = REFUSED[name](model.layers[0].parameters())
    train(model, optimizer, 3)
    for found in run(holds_replicated, 2, name):
        close(found, values(model))


def holds_replicated(name: str) -> dict[str, torch.Tensor]:
    model = built()
    optimizer = REFUSED[name](model.layers[0].parameters())
    train(model, optimizer, 1, whole=True)
    parallelize_model(model, config(rules=[Rule("layers.0", shard=False)]), optimizer)
    train(model, optimizer, 2, first=1)
    return values(model)


@pytest.mark.promise(83)
@pytest.mark.parametrize("replicas", [1, 2])
def test_groups_schedulers_and_several_optimizers(replicas: int) -> None:
    model = built()
    optimizers, schedulers = two_optimizers(model)
    for step in range(4):
        train(model, optimizers, 1, first=step)
        for scheduler in schedulers:
            scheduler.step()
    for found in run(grouped, 4, replicas):
        close(found, values(model))


def two_optimizers(model: Any) -> tuple[list[Optimizer], list[Any]]:
    """AdamW with two groups on part of the model, SGD on another part; the rest is nobody's."""
    adam = torch.optim.AdamW(
        [
            {"params": model.layers[0].parameters(), "lr": 0.01, "initial_lr": 0.02},
            {"params": [model.embed.weight, model.scale], "lr": 0.02, "weight_decay": 0.0, "mine": "kept"},
        ]
    )
    sgd = torch.optim.SGD(model.layers[1].parameters(), 0.1, momentum=0.9)
    return [adam, sgd], [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (adam, sgd)]


def grouped(replicas: int) -> dict[str, torch.Tensor]:
    model = built()
    optimizers, schedulers = two_optimizers(model)
    for step in range(2):
        train(model, optimizers, 1, first=step, whole=True)
        for scheduler in schedulers:
            scheduler.step()
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    lists = [group["params"] for group in groups]
    options = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    names = {id(p): name for name, p in model.named_parameters()}
    held = [[names[id(p)] for p in params] for params in lists]
    parallelize_model(model, config(replicas=replicas), optimizers)
    after = [group for optimizer in optimizers for group in optimizer.param_groups]
    assert [id(g) for g in after] == [id(g) for g in groups]
    assert [id(g["params"]) for g in after] == [id(one) for one in lists]
    assert [{k: v for k, v in group.items() if k != "params"} for group in after] == options
    names = {id(p): name for name, p in model.named_parameters()}
    assert [[names[id(p)] for p in params] for params in lists] == held
    assert set(optimizers[0].state) == {p for group in groups[:2] for p in group["params"]}
    for step in range(2, 4):
        train(model, optimizers, 1, first=step)
        for scheduler in schedulers:
            scheduler.step()
    return values(model)


@pytest.mark.promise(83)
def test_an_optimizer_of_another_model_on_one_rank_is_refused_on_all() -> None:
    results = run(foreign, 2)
    assert results[0] == results[1]
    assert results[0].startswith("Rank 1: AdamW holds 12 parameters (of 12) that are not this model's")


def foreign() -> str:
    model, other = built(), built()
    before = list(model.parameters())
    optimizer = torch.optim.AdamW(trainable(other if dist.get_rank() else model))
    text = refusal(parallelize_model, model, config(), optimizer)
    assert [id(p) for p in model.parameters()] == [id(p) for p in before]
    assert type(model) is Toy
    return text


@pytest.mark.promise(83)
@pytest.mark.parametrize("what", ["class", "lr", "order", "missing"])
def test_optimizers_that_differ_between_ranks_are_refused(what: str) -> None:
    expected = {
        "class": "optimizer 0: Adam on rank 0, AdamW on rank 1",
        "lr": "optimizer 0 group 0 lr: 0.1 on rank 0, 0.2 on rank 1",
        "order": "optimizer 0 group 0 scale: 0 on rank 0, 11 on rank 1",
        "missing": "optimizer 0: rank 0 has it, rank 1 does not",
    }[what]
    results = run(differing, 2, what)
    assert results[0] == results[1]
    assert expected in results[0]


def differing(what: str) -> str:
    model, other = built(), dist.get_rank() == 1
    params = trainable(model)
    optimizer: Any = torch.optim.Adam(params, 0.1)
    if other and what == "class":
        optimizer = torch.optim.AdamW(params, 0.1)
    elif other and what == "lr":
        optimizer = torch.optim.Adam(params, 0.2)
    elif other and what == "order":
        optimizer = torch.optim.Adam(params[::-1], 0.1)
    elif other:
        optimizer = None
    text = refusal(parallelize_model, model, config(), optimizer)
    assert type(model) is Toy
    return text


@pytest.mark.promise(25)
@pytest.mark.parametrize("where", ["outside", "inside"])
def test_adagrads_first_state_is_made_anew_on_meta(where: str) -> None:
    for found in run(adagrad_on_meta, 2, where):
        assert found["embed.weight/sum"].unique().tolist() == [0.25]
        assert {v.item() for k, v in found.items() if k.endswith("step")} == {0.0}
        assert found["embed.weight/sum"].shape == (16, 8)


def adagrad_on_meta(where: str) -> dict[str, torch.Tensor]:
    model = built(device="meta")
    with torch.device("meta" if where == "inside" else "cpu"):
        optimizer = OPTIMIZERS["Adagrad"](trainable(model))
    parallelize_model(model, config(), optimizer)
    state = state_of(model, optimizer)
    train(model, optimizer, 1)
    return state


@pytest.mark.promise(80)
@pytest.mark.parametrize("name", ["Adagrad", "AdamW", "NAdam"])
@pytest.mark.parametrize("before", [0, 2])
def test_rank_0s_state_reaches_ranks_that_hold_the_model_on_meta(name: str, before: int) -> None:
    model = built()
    optimizer = OPTIMIZERS[name](trainable(model))
    train(model, optimizer, before + 2)
    for found in run(state_from_rank0, 2, name, before):
        close(found[0], values(model))
        close(found[1], state_of(model, optimizer), rtol=1e-4)


def state_from_rank0(name: str, before: int) -> Any:
    here = dist.get_rank() == 0
    model = built(device="cpu" if here else "meta")
    optimizer = OPTIMIZERS[name](trainable(model))
    if here:
        train(model, optimizer, before, whole=True)
    parallelize_model(model, config(), optimizer)
    train(model, optimizer, 2, first=before)
    return values(model), state_of(model, optimizer)


@pytest.mark.promise(81)
def test_state_follows_sync() -> None:
    model = built()
    optimizer = OPTIMIZERS["AdamW"](trainable(model))
    train(model, optimizer, 2)
    for found in run(other_steps, 2, "rank0"):
        same(found[0], values(model))
        same(found[1], state_of(model, optimizer))
    assert "different state" in run(other_steps, 2, "auto")[1]


def other_steps(sync: Any) -> Any:
    """Rank 1 is a step behind."""
    model = built()
    optimizer = OPTIMIZERS["AdamW"](trainable(model))
    train(model, optimizer, 2 - dist.get_rank(), whole=True)
    if sync == "auto":
        return refusal(parallelize_model, model, config(sync=sync), optimizer)
    parallelize_model(model, config(sync=sync), optimizer)
    return values(model), state_of(model, optimizer)


@pytest.mark.parametrize("sync", ["auto", "rank0"])
def test_pending_gradients_are_kept(sync: str) -> None:
    model = built()
    torch.nn.functional.cross_entropy(model(tokens()), tokens()).backward()
    expected = {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    for found in run(pending, 2, sync, sync == "rank0"):
        same(found, expected)


def pending(sync: Any, differ: bool) -> Any:
    model = built()
    batch = tokens(3 if differ and dist.get_rank() else 0)
    torch.nn.functional.cross_entropy(model(batch), batch).backward()
    parallelize_model(model, config(sync=sync))
    assert isinstance(model.embed.weight.grad, DTensor)
    return {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def test_pending_gradients_that_differ_between_ranks_are_refused() -> None:
    expected = "The ranks' optimizers hold different state, or their parameters diff"
    for text in run(refusal, 2, pending, "auto", True):
        assert text.startswith(expected)


def refusal(function: Callable[..., object], *args: Any) -> str:
    """The error of a call that must be refused."""
    with pytest.raises(ParallelismValueError) as error:
        function(*args)
    return str(error.value)


def test_state_without_values_is_refused() -> None:
    for text in run(refusal, 2, adam_on_meta):
        assert text.startswith("Adam state 'step' of scale; Adam state 'exp_avg' of scale: its")
        assert "Prepare the model before the first step" in text


def adam_on_meta() -> None:
    model = built(device="meta")
    optimizer = torch.optim.Adam([model.scale], capturable=False)
    optimizer.state[model.scale] = {"step": torch.tensor(1.0), "exp_avg": torch.empty((), device="meta")}
    parallelize_model(model, config(), optimizer)


def test_state_of_another_shape_is_refused_by_name() -> None:
    model = built()
    optimizer = torch.optim.Adam(trainable(model))
    optimizer.state[model.embed.weight]["odd"] = torch.zeros(3)
    optimizer.state[model.scale]["history"] = [torch.zeros(3)]
    text = refusal(parallelize_model, model, config(), optimizer)
    assert "Adam state 'odd' of embed.weight: shape (3,) does not follow from" in text
    assert "Adam state 'history' of scale: a list cannot be sharded" in text


@pytest.mark.promise(94)
@pytest.mark.parametrize("mode", ["foreach", "fused"])
def test_a_group_that_mixes_kinds_is_refused_where_kernels_are_joined(mode: str) -> None:
    model = built()
    optimizer = torch.optim.AdamW(trainable(model), **{mode: True})
    with pytest.raises(ParallelismValueError, match=f"group 0 has {mode}=True .* the replicated scale"):
        parallelize_model(model, config(), optimizer)


@pytest.mark.promise(103)
def test_attributes_and_hooks_are_carried_over() -> None:
    assert run(with_hooks, 2) == [["post embed", "pre scale", "post scale"]] * 2
    assert run(with_hooks, 2, on_meta=True) == [["post embed", "pre scale", "post scale"]] * 2


def with_hooks(on_meta: bool = False) -> list[str]:
    model = built(device="meta" if on_meta else "cpu")
    calls: list[str] = []
    model.embed.weight.no_decay = True
    model.scale.tag = {"a": 1}
    model.layers[0].norm.weight.tag = "frozen"
    model.embed.weight.register_post_accumulate_grad_hook(lambda p: calls.append("post embed"))
    model.scale.register_hook(lambda g: calls.append("pre scale"))
    model.scale.register_post_accumulate_grad_hook(lambda p: calls.append("post scale"))
    parallelize_model(model, config())
    assert model.embed.weight.no_decay is True
    assert model.head.weight is model.embed.weight
    assert model.scale.tag == {"a": 1}
    assert model.layers[0].norm.weight.tag == "frozen"
    model(tokens()).sum().backward()
    return sorted(calls, key=lambda call: ("embed" not in call, "pre" not in call))


@pytest.mark.promise(103)
def test_a_gradient_hook_that_would_be_lost_is_refused_by_name() -> None:
    model = built()
    model.embed.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(ParallelismValueError, match=r"Gradient hooks .* on embed.weight cannot be kept"):
        parallelize_model(model, config())
    assert type(model) is Toy


@pytest.mark.promise(93)
def test_dtypes_and_frozen_parameters_in_one_unit() -> None:
    for found in run(adapted, 2):
        assert found == {"frozen": True, "moved": True, "dtypes": "bfloat16 float32", "state": "float32"}


class Adapted(nn.Module):
    """A frozen bfloat16 matrix and a trained float32 correction, in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 6, dtype=torch.bfloat16)
        self.down = nn.Linear(8, 2, bias=False)
        self.up = nn.Linear(2, 6, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x.bfloat16()).float() + self.up(self.down(x))


def adapted() -> dict[str, Any]:
    model = built(Adapted)
    optimizer = torch.optim.AdamW(trainable(model), 0.1)
    before = values(model)
    done = parallelize_model(model, config(), optimizer)
    assert [unit.name for unit in done.plan.units] == [""]
    for _ in range(10):
        model(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    after = values(model)
    frozen = [name for name in before if name.startswith("base")]
    return {
        "frozen": all(torch.equal(before[name], after[name]) for name in frozen),
        "moved": not any(torch.equal(before[n], after[n]) for n in before if n not in frozen),
        "dtypes": f"{model.base.weight.dtype} {model.up.weight.dtype}".replace("torch.", ""),
        "state": str(optimizer.state[model.up.weight]["exp_avg"].dtype).replace("torch.", ""),
    }


@pytest.mark.promise(24)
def test_training_equals_the_unsharded_model() -> None:
    model = built()
    train(model, torch.optim.AdamW(trainable(model), 0.01), 3)
    for size, replicas in ((1, 1), (2, 1), (4, 1), (4, 2)):
        for found in run(trained, size, replicas):
            close(found, values(model))


def trained(replicas: int) -> dict[str, torch.Tensor]:
    model = built()
    optimizer = torch.optim.AdamW(trainable(model), 0.01)
    parallelize_model(model, config(replicas=replicas), optimizer)
    train(model, optimizer, 3)
    return values(model)


@pytest.mark.promise(25)
def test_an_optimizer_of_frozen_parameters_only_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model[0].parameters())
    model[0].requires_grad_(False)
    with pytest.raises(ValueError, match=r"AdamW holds only frozen parameters \(2\).*it would move nothing"):
        check_optimizers([optimizer], read_structure(model), {})
    model[1].requires_grad_(False)
    check_optimizers([optimizer], read_structure(model), {})


@pytest.mark.promise(25)
def test_an_optimizer_that_was_not_passed_is_named() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    forgotten, passed = torch.optim.SGD(model.parameters()), torch.optim.AdamW(model.parameters())
    elsewhere = torch.optim.SGD(other.parameters())
    found = forgotten_optimizers([passed], read_structure(model))
    assert len(found) == 1
    assert found[0].startswith("SGD holds 2 parameters of this model, but was not passed")
    assert forgotten_optimizers([passed, forgotten], read_structure(model)) == []
    assert len(elsewhere.param_groups) == 1
