"""Optimizer state by name: live, and made anew for a reader."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim import Optimizer

from composer_dist._torch import checkpoint_wrapper
from composer_dist.checkpoint import (
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
from tests.kit.compare import fails
from tests.kit.meshes import config
from tests.kit.toy import built, train
from tests.kit.world import on_ranks


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
