"""Optimizer state by name: live, and made anew for a reader."""

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim import Optimizer

from composer_dist._torch import checkpoint_wrapper
from composer_dist.checkpoint import (
    full_model_state,
    full_optimizer,
    full_optimizer_state,
    load_checkpoint,
    load_full_optimizer_state,
    save_checkpoint,
)
from composer_dist.checkpoint.kinds import optimizer as optimizer_kind
from composer_dist.checkpoint.kinds.optimizer import prepare_optimizer_state
from composer_dist.checkpoint.kinds.optimizer_names import named_optimizer_state, parameter_names
from composer_dist.distributed import parallelize_model
from composer_dist.errors import CheckpointKeyError, CheckpointValueError
from composer_dist.tensors.nested import named_tensors
from tests.kit.compare import equal, fails, fails_alike, full
from tests.kit.meshes import MESHES, config
from tests.kit.runs import train_by_name
from tests.kit.toy import built, train
from tests.kit.world import on_ranks, run


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices with weight decay, the rest without; the frozen row among them."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], "lr": 0.01, "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim <= 1], "lr": 0.02, "weight_decay": 0.0},
    ]


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(two_groups(model))


def as_meta(state: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Shapes and dtypes alone, as a checkpoint's index tells them."""

    def shape_of(value: Any) -> Any:
        tensor = isinstance(value, Tensor)
        return torch.empty(value.shape, dtype=value.dtype, device="meta") if tensor else value

    return {name: {key: shape_of(v) for key, v in values.items()} for name, values in state.items()}


def kind_of(value: Tensor) -> tuple[Any, ...]:
    cut = (value.placements, value.to_local().shape) if isinstance(value, DTensor) else ()
    return (type(value), value.shape, value.dtype, value.device, *cut)


@pytest.mark.promise(47)
@pytest.mark.parametrize("size", [1, 2])
@on_ranks("size")
def test_live_state_by_name_and_the_same_made_without_a_step(size: int) -> None:
    model = built()
    optimizer = adamw(model)
    parallelize_model(model, config(), optimizer)
    empty = named_optimizer_state(model, optimizer)
    assert (empty["state"], [len(group["params"]) for group in empty["param_groups"]]) == ({}, [6, 7])
    train(model, optimizer, 1)
    with CommDebugMode() as communication:
        found = named_optimizer_state(model, optimizer)
    assert communication.get_total_counts() == 0
    parameters, first = dict(model.named_parameters()), found["state"]
    assert list(first) == [name for name in parameters if name in first]
    assert "row" not in first, "frozen and without gradient"
    kept = prepare_optimizer_state(model, optimizer, as_meta(first)).values
    fresh = adamw(model)
    prepared = prepare_optimizer_state(model, fresh, as_meta(first), found["param_groups"])
    assert not fresh.state
    made = prepared.values
    prepared.install()
    for name, values in first.items():
        for key, value in values.items():
            assert value is optimizer.state[parameters[name]][key]
            assert value is kept[name][key]
            assert kind_of(value) == kind_of(made[name][key])
    up = made["layers.0.up.weight"]["exp_avg"]
    assert isinstance(up, DTensor)
    assert (up.to_local().shape[0] < 5) == (size == 2)
    assert fresh.state[parameters["layers.0.up.weight"]]["exp_avg"] is up
    assert float(made["scale"]["step"]) == 0


def test_names_are_those_of_the_model_without_wrappers() -> None:
    model = built()
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    optimizer = adamw(model)
    train(model, optimizer, 1)
    found = named_optimizer_state(model, optimizer)
    plain = built()
    names = [name for name, _ in plain.named_parameters()]
    assert list(found["state"]) == [name for name in names if name != "row"]
    assert "embed.weight" in found["state"]
    assert "head.weight" not in found["state"], "the tied one goes by its first name"


def test_parameters_of_another_model_are_counted() -> None:
    with pytest.raises(CheckpointValueError, match=r"AdamW holds 13 parameters \(of 13\) that are not"):
        named_optimizer_state(built(), adamw(built()))


@pytest.mark.promise(48)
def test_what_does_not_fit_is_refused_before_anything_changes() -> None:
    model = built()
    optimizer = adamw(model)
    train(model, optimizer, 1)
    before = named_optimizer_state(model, optimizer)
    wrong = {"layers.0.up.weight": {"exp_avg": torch.zeros(6, 8)}, "scale": {}}
    groups = before["param_groups"]
    mixed = [groups[0] | {"params": ["layers.0.up.bias"]}, groups[1] | {"params": ["scale"]}]
    for given, options, kind, text in (
        ({"nope": {}, "layers.9": {}}, [], CheckpointKeyError, "not hold these parameters: nope, layers.9"),
        (wrong, [], CheckpointValueError, "exp_avg of layers.0.up.weight: (6, 8) in the state"),
        ({"scale": {}}, [groups[:1]], CheckpointValueError, "1 parameter group, the optimizer 2"),
        ({"scale": {}}, [mixed], CheckpointValueError, "group 1 come from groups [0, 1]"),
        ({"scale": {}}, [mixed], CheckpointValueError, "layers.0.up.bias (0)"),
    ):
        with fails(kind, text):
            prepare_optimizer_state(model, optimizer, given, *options)
    after = named_optimizer_state(model, optimizer)
    assert {n: list(v) for n, v in after["state"].items()} == {n: list(v) for n, v in before["state"].items()}


@pytest.mark.promise(48)
def test_groups_match_by_name_in_any_order_and_state_can_be_taken_away() -> None:
    model = built()
    optimizer = adamw(model)
    train(model, optimizer, 1)
    groups = named_optimizer_state(model, optimizer)["param_groups"]
    turned = [{"params": group["params"][::-1]} for group in adamw(model).param_groups[::-1]]
    other = torch.optim.AdamW(turned)
    prepare_optimizer_state(model, other, {"scale": {}}, groups).install()
    found = [(group["lr"], group["weight_decay"]) for group in other.param_groups]
    assert found == [(0.02, 0.0), (0.01, 0.1)]
    prepare_optimizer_state(model, optimizer, {"scale": {}}).install()
    assert "scale" not in named_optimizer_state(model, optimizer)["state"]


def test_names_are_looked_up_and_not_compared_with_all_others(tmp_path: Path) -> None:
    compared: list[str] = []

    class Name(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            compared.append(self)
            return str.__eq__(self, other)

    def names_of(*args: Any) -> dict[int, str]:
        return {number: Name(name) for number, name in parameter_names(*args).items()}

    model = nn.ParameterList(torch.ones(2) for _ in range(300))
    optimizer = torch.optim.AdamW(model.parameters())
    sum(one.sum() for one in model).backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    save_checkpoint(tmp_path / "saved", state)
    full = full_optimizer_state(model, optimizer)
    calls: dict[Any, Callable[[], object]] = {
        optimizer_kind: lambda: load_checkpoint(tmp_path / "saved", state),
        full_optimizer: lambda: load_full_optimizer_state(model, optimizer, full),
    }
    for module, call in calls.items():
        compared.clear()
        with mock.patch.object(module, "parameter_names", names_of):
            call()
        assert 0 < len(compared) < 20 * len(model)


@on_ranks(2)
def test_factored_state_is_laid_out_by_the_dimensions_it_has() -> None:
    model = built()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    parallelize_model(model, config(), optimizer)
    described = {"row": torch.empty(5, 1), "column": torch.empty(1, 8), "other": torch.empty(5)}
    made = prepare_optimizer_state(model, optimizer, {"layers.0.up.weight": described}).values
    row, column, other = made["layers.0.up.weight"].values()
    assert type(row) is type(column) is DTensor
    assert (row.shape, row.to_local().shape) == ((5, 1), (2 if dist.get_rank() else 3, 1))
    assert column.shape == column.to_local().shape == (1, 8)
    assert (type(other), other.shape) == (Tensor, (5,))


def lbfgs() -> tuple[nn.Module, Optimizer]:
    """A model whose first parameter, a vector, has the state."""
    model = built(lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)))
    return model, torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3)


def step_lbfgs(model: nn.Module, optimizer: Optimizer) -> None:
    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(torch.arange(64.0).sin().view(8, 8)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


@pytest.mark.promise(47)
@pytest.mark.parametrize("way", ["sharded", "file", "full"])
def test_lbfgs_continues_from_the_tensors_in_its_lists(tmp_path: Path, way: str) -> None:
    model, optimizer = lbfgs()
    for _ in range(3):
        step_lbfgs(model, optimizer)
    other, fresh = lbfgs()
    if way == "full":
        other.load_state_dict(model.state_dict())
        load_full_optimizer_state(other, fresh, full_optimizer_state(model, optimizer))
    else:
        save_checkpoint(tmp_path / "c", {"model": model, "opt": optimizer}, sharded=way == "sharded")
        assert load_checkpoint(tmp_path / "c", {"model": other, "opt": fresh}) == {}
    equal(named_optimizer_state(other, fresh), named_optimizer_state(model, optimizer))
    step_lbfgs(model, optimizer)
    step_lbfgs(other, fresh)
    equal(dict(other.state_dict()), dict(model.state_dict()))


class Nested(Optimizer):
    """Keeps tensors in lists, dictionaries and tuples, cut like their parameter or not."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            state, whole = self.state[p], full(p.grad)
            history = state.setdefault("history", [])
            history.append(p.grad.clone())
            del history[:-2]
            factors = state.setdefault("factors", {"whole": torch.zeros_like(whole), "none": [None]})
            factors["whole"] += whole
            state["pair"] = (whole.norm(), 3.0)
            state["first"] = {0: laid_out(whole.flatten()[:1].clone(), p)}
            update = full(history[0]) + factors["whole"] * state["pair"][0] + full(state["first"][0]).sum()
            p.sub_(laid_out(update, p, p.placements if isinstance(p, DTensor) else None))


def laid_out(whole: Tensor, parameter: Any, placements: Any = None) -> Tensor:
    """A DTensor if the parameter is one."""
    sharded = isinstance(parameter, DTensor)
    return distribute_tensor(whole, parameter.device_mesh, placements) if sharded else whole


def nested(mesh: str, seed: int) -> tuple[nn.Module, Optimizer]:
    model = built(seed=seed)
    optimizer = Nested(model.parameters())
    if (config := MESHES[mesh][1]) is not None:
        parallelize_model(model, config, optimizer)
    return model, optimizer


def nested_state(model: nn.Module, optimizer: Optimizer) -> Any:
    """In full, on the first rank, without what only says how it is cut."""
    state = full_optimizer_state(model, optimizer)
    state.pop("irregular", None)
    return state, full_model_state(model)


def save_nested(path: str, mesh: str, sharded: bool) -> Any:
    model, optimizer = nested(mesh, 0)
    train_by_name(model, optimizer, 0, 3)
    state = {"model": model, "opt": optimizer}
    save_checkpoint(path, state, sharded=sharded)
    at = nested_state(model, optimizer)
    train_by_name(model, optimizer, 3, 2)
    return at, nested_state(model, optimizer)


def load_nested(path: str, mesh: str) -> Any:
    model, optimizer = nested(mesh, 1)
    assert load_checkpoint(path, {"model": model, "opt": optimizer}) == {}
    at = nested_state(model, optimizer)
    assert {name: kind_of(p.detach()) for name, p in model.named_parameters() if p.requires_grad} == {
        name: kind_of(values["history"][0])
        for name, values in named_optimizer_state(model, optimizer)["state"].items()
    }
    train_by_name(model, optimizer, 3, 2)
    return at, nested_state(model, optimizer)


@pytest.mark.promise(58)
@pytest.mark.parametrize("sharded", [True, False])
def test_tensors_in_lists_and_dictionaries_load_on_any_mesh(tmp_path: Path, sharded: bool) -> None:
    path = str(tmp_path / "c")
    saved = run(save_nested, 2, path, "fsdp2", sharded)[0]
    assert saved[0][0]["state"]["layers.0.up.weight"]["history"][1].shape == (5, 8)
    for mesh in ("plain", "ddp", "fsdp2"):
        equal(run(load_nested, MESHES[mesh][0], path, mesh)[0], saved)


@pytest.mark.promise(48)
@on_ranks(2)
def test_tensors_in_lists_dictionaries_and_deques_load_from_a_full_state() -> None:
    model, optimizer = nested("fsdp2", 0)
    train_by_name(model, optimizer, 0, 3)
    weight = optimizer.param_groups[0]["params"][0]
    optimizer.state[weight]["queue"] = deque([weight.detach().clone()], maxlen=3)
    state = full_optimizer_state(model, optimizer)
    other, fresh = nested("fsdp2", 0)
    assert load_full_optimizer_state(other, fresh, state) == ([], [])
    assert fresh.state[fresh.param_groups[0]["params"][0]]["queue"].maxlen == 3
    equal(full_optimizer_state(other, fresh), state)
    found, made = (named_optimizer_state(*pair)["state"] for pair in ((model, optimizer), (other, fresh)))
    for name, values in found.items():
        pairs = zip(named_tensors(values), named_tensors(made[name]), strict=True)
        assert all(kind_of(one) == kind_of(two) for (_, one), (_, two) in pairs), name


@pytest.mark.promise(47)
@on_ranks(2)
def test_shards_that_cannot_be_saved_are_refused_by_name(tmp_path: Path) -> None:
    model = built()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    parallelize_model(model, config(), optimizer)
    up = model.layers[0].up.weight
    where = "o.state.layers.0.up.weight.mine"
    partial = DTensor.from_local(torch.ones(3), up.device_mesh, [Partial()])
    for value, text in (
        (deque([up.detach()]), f"{where}: shards in a tuple or a set, a deque or an object"),
        ([partial], f"{where}.0 is a DTensor of partial sums"),
        ([up.to_local().clone()], "plain tensors that have no full value: mine.0 of layers.0.up.weight"),
    ):
        optimizer.state[up] = {"mine": value}
        with fails_alike(CheckpointValueError, text):
            save_checkpoint(tmp_path / "c", {"m": model, "o": optimizer})
    odd = torch.full((2, 2), dist.get_rank())
    for key, value in (("mine", odd), ("mine.0", [odd[0]])):
        optimizer.state[up] = {"mine": value}
        text = f"plain tensors that differ between ranks: {key} of layers.0.up.weight"
        with fails_alike(CheckpointValueError, text):
            save_checkpoint(tmp_path / "c", {"m": model, "o": optimizer})
        with fails_alike(CheckpointValueError, text):
            full_optimizer_state(model, optimizer)
    optimizer.state[up] = {"mine": [torch.ones(2)], "mine.0": torch.ones(3)}
    with fails_alike(CheckpointValueError, "several tensors as mine.0 of layers.0.up.weight"):
        full_optimizer_state(model, optimizer)
