"""Optimizer state by name: live, and made anew for a reader."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim import Optimizer

from composer_dist._torch import checkpoint_wrapper
from composer_dist.checkpoint.kinds.optimizer import prepare_optimizer_state
from composer_dist.checkpoint.kinds.optimizer_names import named_optimizer_state
from composer_dist.distributed import parallelize_model
from composer_dist.errors import CheckpointKeyError, CheckpointValueError
from tests.kit.meshes import config
from tests.kit.toy import built, train
from tests.kit.world import World


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
    return {
        name: {
            key: torch.empty(value.shape, dtype=value.dtype, device="meta")
            if isinstance(value, Tensor)
            else value
            for key, value in values.items()
        }
        for name, values in state.items()
    }


def live() -> dict[str, Any]:
    model = built()
    optimizer = adamw(model)
    parallelize_model(model, config(), optimizer)
    empty = named_optimizer_state(model, optimizer)
    train(model, optimizer, 1)
    with CommDebugMode() as communication:
        found = named_optimizer_state(model, optimizer)
    names = dict(model.named_parameters())
    first, described = found["state"], as_meta(found["state"])
    kept = prepare_optimizer_state(model, optimizer, described).values
    fresh = adamw(model)
    prepared = prepare_optimizer_state(model, fresh, described, found["param_groups"])
    untouched, made = not fresh.state, prepared.values
    prepared.install()
    up = made["layers.0.up.weight"]["exp_avg"]
    return {
        "empty": (empty["state"], [len(group["params"]) for group in empty["param_groups"]]),
        "own": all(first[n][k] is optimizer.state[names[n]][k] for n in first for k in first[n]),
        "order": list(first) == [name for name in names if name in first],
        "kept": all(kept[n][k] is first[n][k] for n in first for k in first[n]),
        "collectives": communication.get_total_counts(),
        "row": "row" in first,
        "same": [
            (type(a), a.shape, a.dtype, a.device) == (type(b), b.shape, b.dtype, b.device)
            and (
                not isinstance(a, DTensor)
                or (a.placements, a.to_local().shape) == (b.placements, b.to_local().shape)
            )
            for n in first
            for a, b in zip(first[n].values(), made[n].values(), strict=True)
        ],
        "cut": isinstance(up, DTensor) and up.to_local().shape[0] < 5,
        "untouched": untouched,
        "in_place": fresh.state[names["layers.0.up.weight"]]["exp_avg"] is up,
        "step": float(made["scale"]["step"]),
    }


@pytest.mark.promise(47)
@pytest.mark.parametrize("size", [1, 2])
def test_live_state_by_name_and_the_same_made_without_a_step(world1: World, world2: World, size: int) -> None:
    for found in (world1, world2)[size - 1](live):
        assert found["empty"] == ({}, [6, 7])
        assert found["own"]
        assert found["order"]
        assert found["kept"]
        assert found["collectives"] == 0
        assert not found["row"], "frozen and without gradient"
        assert all(found["same"])
        assert found["cut"] == (size == 2)
        assert found["untouched"]
        assert found["in_place"]
        assert found["step"] == 0


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
    with pytest.raises(CheckpointKeyError, match=r"does not hold these parameters: nope, layers\.9"):
        prepare_optimizer_state(model, optimizer, {"nope": {}, "layers.9": {}})
    wrong = {"layers.0.up.weight": {"exp_avg": torch.zeros(6, 8)}, "scale": {}}
    with pytest.raises(
        CheckpointValueError, match=r"exp_avg of layers\.0\.up\.weight: \(6, 8\) in the state"
    ):
        prepare_optimizer_state(model, optimizer, wrong)
    groups = before["param_groups"]
    with pytest.raises(CheckpointValueError, match="1 parameter group, the optimizer 2"):
        prepare_optimizer_state(model, optimizer, {"scale": {}}, groups[:1])
    mixed = [groups[0] | {"params": []}, groups[1] | {"params": ["scale"]}]
    mixed[0]["params"] = ["layers.0.up.bias"]
    with pytest.raises(
        CheckpointValueError, match=r"group 1 come from groups \[0, 1\].*layers\.0\.up\.bias \(0\)"
    ):
        prepare_optimizer_state(model, optimizer, {"scale": {}}, mixed)
    after = named_optimizer_state(model, optimizer)
    assert {n: list(v) for n, v in after["state"].items()} == {n: list(v) for n, v in before["state"].items()}


@pytest.mark.promise(48)
def test_groups_match_by_name_in_any_order_and_state_can_be_taken_away() -> None:
    model = built()
    optimizer = adamw(model)
    train(model, optimizer, 1)
    groups = named_optimizer_state(model, optimizer)["param_groups"]
    other = torch.optim.AdamW(
        [{"params": group["params"][::-1]} for group in adamw(model).param_groups[::-1]]
    )
    prepare_optimizer_state(model, other, {"scale": {}}, groups).install()
    assert [(group["lr"], group["weight_decay"]) for group in other.param_groups] == [
        (0.02, 0.0),
        (0.01, 0.1),
    ]
    prepare_optimizer_state(model, optimizer, {"scale": {}}).install()
    assert "scale" not in named_optimizer_state(model, optimizer)["state"]


def test_factored_state_is_laid_out_by_the_dimensions_it_has(world2: World) -> None:
    for rows, columns, other in world2(factored):
        assert rows == (DTensor, (5, 1), (3, 1)) or rows == (DTensor, (5, 1), (2, 1))
        assert columns == (DTensor, (1, 8), (1, 8))
        assert other == (Tensor, (5,), (5,))


def factored() -> list[Any]:
    model = built()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    parallelize_model(model, config(), optimizer)
    described = {"row": torch.empty(5, 1), "column": torch.empty(1, 8), "other": torch.empty(5)}
    made = prepare_optimizer_state(model, optimizer, {"layers.0.up.weight": described}).values
    return [
        (type(v), tuple(v.shape), tuple((v.to_local() if isinstance(v, DTensor) else v).shape))
        for v in made["layers.0.up.weight"].values()
    ]
