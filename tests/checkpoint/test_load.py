"""What is restored, in place, and what does not fit."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer_dist.checkpoint import (
    full_model_state,
    load_checkpoint,
    load_full_model_state,
    load_full_optimizer_state,
    load_pretrained,
    save_checkpoint,
)
from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.distributed.prepare import parallelize_model
from composer_dist.errors import (
    CheckpointKeyError,
    CheckpointRuntimeError,
    CheckpointValueError,
    ParallelismError,
    ParallelismRuntimeError,
)
from tests.kit.compare import equal
from tests.kit.runs import assert_same, save_run, snapshot, start, train
from tests.kit.toy import Stateful, sharded, stateful
from tests.kit.world import World


def ask_for_absent(path: str) -> tuple[str, dict[str, Any]]:
    model, _ = start("fsdp2", stateful, 1)
    state: dict[str, Any] = {"model": model, "absent": 5}
    with pytest.raises(CheckpointKeyError) as caught:
        load_checkpoint(path, state)
    assert isinstance(caught.value, KeyError)
    with pytest.warns(UserWarning, match="missing: absent"):
        load_checkpoint(path, state, strict=False)
    return str(caught.value), {"absent": state["absent"]}


@pytest.mark.promise(50)
@pytest.mark.parametrize("sharded", [True, False])
def test_an_absent_key(world2: World, tmp_path: Path, sharded: bool) -> None:
    path = str(tmp_path / "c")
    world2(save_run, path, "fsdp2", sharded=sharded)
    for text, state in world2(ask_for_absent, path):
        assert "missing: absent" in text
        assert state == {"absent": 5}


def restore_in_place(path: str, sharded: bool) -> None:
    model, optimizer = start("fsdp2", stateful, 0)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3])
    train(model, optimizer)
    scheduler.step()
    plain = {"epoch": 3, "best": {"loss": float("inf"), 2: [1, (2, 3)]}, "rng": torch.get_rng_state()}
    save_checkpoint(path, {"model": model, "scheduler": scheduler, **plain}, sharded=sharded)
    other = torch.optim.lr_scheduler.MultiStepLR(optimizer, [7])
    state: dict[str, Any] = {"model": model, "scheduler": other, **dict.fromkeys(plain)}
    assert load_checkpoint(path, state) == {}
    assert state["scheduler"] is other
    assert other.state_dict() == scheduler.state_dict()
    assert torch.equal(state.pop("rng"), plain.pop("rng"))
    assert {key: state[key] for key in plain} == plain


@pytest.mark.promise(55)
@pytest.mark.parametrize("sharded", [True, False])
def test_stateful_objects_are_restored_in_place(world2: World, tmp_path: Path, sharded: bool) -> None:
    world2(restore_in_place, str(tmp_path / "c"), sharded)


class Longer(Stateful):
    """With a layer more than was saved, and without the scale."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(4, 4)
        del self.scale
        self.register_buffer("cache", torch.full((2,), 3.0), persistent=False)


def load_longer(path: str) -> tuple[str, list[str], bool, dict[str, Any]]:
    torch.manual_seed(5)
    model = Longer()
    kept = model.extra.weight.detach().clone()
    parallelize_model(model, FSDP2Config())
    before = full_model_state(model, ranks="all")
    try:
        load_checkpoint(path, {"model": model})
    except Exception as error:
        text = str(error)
    unchanged = full_model_state(model, ranks="all")
    assert all(torch.equal(value, unchanged[n]) for n, value in before.items() if isinstance(value, Tensor))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_checkpoint(path, {"model": model}, strict=False)
    after = full_model_state(model, ranks="all")
    return text, [str(one.message) for one in caught], torch.equal(after["extra.weight"], kept), after


@pytest.mark.promise(56)
@pytest.mark.parametrize("sharded", [True, False])
def test_a_new_layer(world2: World, tmp_path: Path, sharded: bool) -> None:
    path = str(tmp_path / "c")
    saved = world2(save_run, path, "fsdp2", sharded=sharded)[0][0]
    for text, messages, kept, after in world2(load_longer, path):
        for one in (text, *messages):
            assert "missing: model.extra.weight, model.extra.bias" in one
            assert "unexpected: model.scale" in one
        assert len(messages) == 1
        assert kept
        equal({n: v for n, v in after.items() if n in saved}, {n: saved[n] for n in saved if n != "scale"})


def load_raw(path: str) -> dict[str, str]:
    found = {}
    model, _ = start("fsdp2", stateful, 1)
    load_checkpoint(path + "good", model)
    equal(full_model_state(model, ranks="all"), torch.load(path + "good", weights_only=True))
    for what in ("less", "more"):
        with pytest.raises(CheckpointKeyError) as caught:
            load_checkpoint(path + what, model)
        found[what] = str(caught.value)
    load_checkpoint(path + "buffer", model)
    return found


@pytest.mark.promise(57)
def test_a_raw_state(world2: World, tmp_path: Path) -> None:
    state = stateful(3).state_dict()
    for what, one in {
        "good": state,
        "less": {name: value for name, value in state.items() if name != "scale"},
        "more": {**state, "stray": torch.ones(2)},
        "buffer": {**state, "table": torch.ones(3)},
    }.items():
        torch.save(one, tmp_path / f"raw_{what}")
    for found in world2(load_raw, str(tmp_path / "raw_")):
        assert "missing: the state.scale" in found["less"]
        assert "unexpected: the state.stray" in found["more"]


def load_other_shape(path: str) -> str:
    model = stateful()
    model.layers[0].up = nn.Linear(8, 6)  # type: ignore[union-attr]
    parallelize_model(model, FSDP2Config())
    with pytest.raises(CheckpointValueError) as caught:
        load_checkpoint(path, {"model": model}, strict=False)
    return str(caught.value)


def test_shapes_that_differ_are_named(world2: World, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    world2(save_run, path, "fsdp2")
    first, second = world2(load_other_shape, path)
    assert first == second
    assert "model.layers.0.up.weight is (5, 8) in the checkpoint, (6, 8) in the model" in first


def load_meta(path: str, how: str) -> dict[str, Any]:
    with torch.device("meta"):
        model = Stateful()
    model.table = torch.zeros(3)  # no checkpoint has it, and nothing initializes it
    if how == "weights":
        parallelize_model(model, FSDP2Config(), weights=path)
    elif how == "pretrained":
        load_pretrained(sharded(model), path)
    else:
        sharded(model)
        load_checkpoint(path, {"model": model})
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return {name: v for name, v in full_model_state(model, ranks="all").items() if isinstance(v, Tensor)}


@pytest.mark.parametrize(
    ("directory", "how"), [(True, "weights"), (False, "weights"), (True, "pretrained"), (True, "load")]
)
def test_into_a_model_from_meta(world2: World, tmp_path: Path, directory: bool, how: str) -> None:
    path = str(tmp_path / "c")
    saved = world2(save_run, path, "fsdp2", sharded=directory)[0][0]
    for state in world2(load_meta, path, how):
        equal(state, {name: value for name, value in saved.items() if isinstance(value, Tensor)})


class Evil:
    """Runs code when unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("raise SystemExit('it ran')",))


def load_evil(path: str) -> list[str]:
    model, _ = start("fsdp2", stateful, 0)
    save_checkpoint(path, {"model": model, "evil": Evil()})
    for state in ({"model": model, "evil": None}, None):
        with pytest.raises(CheckpointValueError, match="allow_pickle"):
            load_checkpoint(path, state)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_checkpoint(path, {"model": model})
    return [str(one.message) for one in caught]


def test_no_pickle_runs_unless_asked_for(world2: World, tmp_path: Path) -> None:
    for (message,) in world2(load_evil, str(tmp_path / "c")):
        assert "'evil' of the checkpoint is left out" in message


def sharded_values(path: str) -> None:
    model, _ = start("fsdp2", stateful, 0)
    averages = {name: parameter.detach() * 2 for name, parameter in model.named_parameters()}
    expected = {name: value.full_tensor() for name, value in averages.items()}
    save_checkpoint(path, {"model": model, "ema": averages})
    zeros = {name: torch.zeros_like(value) for name, value in averages.items()}
    state: dict[str, Any] = {"model": model, "ema": zeros}
    load_checkpoint(path, state)
    for name, value in state["ema"].items():
        assert value is zeros[name]
        assert torch.equal(value.full_tensor(), expected[name])


def test_shards_among_the_values(world2: World, tmp_path: Path) -> None:
    world2(sharded_values, str(tmp_path / "c"))


class Broken:
    def state_dict(self) -> dict[str, Any]:
        return {"place": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if dist.get_rank() == 1:
            raise OSError("the disk is gone")


def load_halfway(path: str) -> str:
    model, optimizer = start("fsdp2", stateful, 0)
    state = {"model": model, "optimizer": optimizer, "data": Broken()}
    save_checkpoint(path, state)
    with pytest.raises(ParallelismRuntimeError, match="the disk is gone"):
        load_checkpoint(path, state)
    _, other = start("fsdp2", stateful, 0)
    other.step()
    for use in (optimizer.step, lambda: load_full_optimizer_state(model, optimizer, {})):
        with pytest.raises(CheckpointRuntimeError, match="AdamW is unusable.*the disk is gone"):
            use()
    with pytest.raises(ParallelismRuntimeError) as caught:
        full_model_state(model)
    return str(caught.value)


def test_a_load_that_fails_on_one_rank_leaves_nothing_half_loaded_unnoticed(
    world2: World, tmp_path: Path
) -> None:
    first, second = world2(load_halfway, str(tmp_path / "c"))
    assert first == second
    assert "the disk is gone" in first


class Odd:
    """What is not restored without running code."""


def load_in_vain(path: str) -> str:
    model, optimizer = start("fsdp2", stateful, 0)
    train(model, optimizer)
    save_checkpoint(path, {"model": model, "optimizer": optimizer, "odd": Odd()})
    train(model, optimizer)
    before = snapshot(model, optimizer)
    with pytest.raises(CheckpointValueError) as caught:
        load_checkpoint(path, {"model": model, "optimizer": optimizer, "odd": None})
    assert_same(snapshot(model, optimizer), before)
    optimizer.step()
    return str(caught.value)


def test_what_cannot_be_read_is_found_before_anything_changes(world2: World, tmp_path: Path) -> None:
    first, second = world2(load_in_vain, str(tmp_path / "c"))
    assert first == second
    assert "odd is an object that could run code" in first


def load_differently(path: str) -> list[str]:
    model, _ = start("fsdp2", stateful, 0)
    save_checkpoint(path, {"model": model, "steps": 1})
    rank, texts = dist.get_rank(), []
    calls: list[Callable[[], Any]] = [
        lambda: load_checkpoint(path, {"model": model} | ({"steps": 0} if rank else {})),
        lambda: load_checkpoint(path, {"model": model}, verify=bool(rank)),
        lambda: full_model_state(model, ranks="all" if rank else "zero"),
        lambda: load_full_model_state(model, stateful().state_dict(), source="all" if rank else "rank0"),
        lambda: load_checkpoint(None if rank else path, {"model": model}),  # type: ignore[arg-type]
    ]
    for call in calls:
        with pytest.raises(ParallelismError) as caught:
            call()
        texts.append(str(caught.value))
    assert load_checkpoint(path, {"model": model}) == {"steps": 1}
    return texts


def test_ranks_that_make_different_calls_all_raise(world2: World, tmp_path: Path) -> None:
    first, second = world2(load_differently, str(tmp_path / "c"))
    assert first == second
    words = ["load differently", "load differently", "different options", "sources", "Rank 1: There is no"]
    assert all(word in text for word, text in zip(words, first, strict=True))
