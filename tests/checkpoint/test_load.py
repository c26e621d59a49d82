"""What is restored, in place, and what does not fit."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

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
from tests.kit.compare import equal, fails_alike, tensors_of
from tests.kit.runs import assert_same, save_run, snapshot, start, train
from tests.kit.toy import Stateful, sharded, stateful
from tests.kit.world import World, on_ranks

EACH_FORM = pytest.mark.parametrize("form", ["sharded", "one file"])


@pytest.mark.promise(50)
@EACH_FORM
@on_ranks(2)
def test_an_absent_key(tmp_path: Path, form: str) -> None:
    save_run(str(tmp_path / "c"), "fsdp2", sharded=form == "sharded")
    model, _ = start("fsdp2", stateful, 1)
    state: dict[str, Any] = {"model": model, "absent": 5}
    assert issubclass(CheckpointKeyError, KeyError)
    with pytest.raises(CheckpointKeyError, match="missing: absent"):
        load_checkpoint(tmp_path / "c", state)
    with pytest.warns(UserWarning, match="missing: absent") as caught:
        load_checkpoint(tmp_path / "c", state, strict=False)
    assert {one.filename for one in caught} == {__file__}
    assert state["absent"] == 5


class Headed(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(64, 64), nn.Linear(64, 64, bias=False)
        if tied:
            self.head.weight = self.embed.weight


@EACH_FORM
@on_ranks(2)
def test_different_values_for_a_tied_tensor_are_refused(tmp_path: Path, form: str) -> None:
    untied, tied = Headed(False), Headed(True)
    parallelize_model(untied, FSDP2Config())
    parallelize_model(tied, FSDP2Config())
    before = full_model_state(tied, ranks="all")
    path = tmp_path / "untied"
    save_checkpoint(path, {"model": untied}, sharded=form == "sharded")
    text = (
        f"model.embed.weight and model.head.weight differ in {path}, but the model ties them as embed.weight"
    )
    with fails_alike(CheckpointValueError, text):
        load_checkpoint(path, {"model": tied}, strict=False)
    equal(full_model_state(tied, ranks="all"), before)
    load_checkpoint(path, {"model": tied}, ignore=lambda name: name == "model.embed.weight")
    head = full_model_state(untied, ranks="all")["head.weight"]
    assert torch.equal(full_model_state(tied, ranks="all")["embed.weight"], head)
    with torch.no_grad():
        untied.embed.weight.copy_(untied.head.weight)  # the same values, stored twice
    save_checkpoint(path, {"model": untied}, sharded=form == "sharded")
    load_checkpoint(path, {"model": tied})
    save_checkpoint(tmp_path / "tied", {"model": tied}, sharded=form == "sharded")
    load_checkpoint(tmp_path / "tied", {"model": tied})
    assert torch.equal(full_model_state(tied, ranks="all")["head.weight"], head)
    loaded = load_checkpoint(tmp_path / "tied")["model"]
    assert loaded["head.weight"] is loaded["embed.weight"]
    assert torch.equal(loaded["head.weight"], head)


def test_what_is_ignored_may_be_unexpected_in_model_and_optimizer(tmp_path: Path) -> None:
    large = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    small = nn.Sequential(nn.Linear(2, 2))
    states = [{"model": one, "optimizer": torch.optim.AdamW(one.parameters())} for one in (large, small)]
    large(torch.ones(1, 2)).sum().backward()
    states[0]["optimizer"].step()
    save_checkpoint(tmp_path / "c", states[0])
    load_checkpoint(tmp_path / "c", states[1], ignore=lambda name: name.split(".")[1] == "1")
    assert torch.equal(small[0].weight, large[0].weight)
    expected, found = (one["optimizer"].state[one["model"][0].weight]["exp_avg"] for one in states)  # type: ignore
    assert torch.equal(found, expected)


@pytest.mark.promise(55)
@EACH_FORM
@on_ranks(2)
def test_stateful_objects_are_restored_in_place(tmp_path: Path, form: str) -> None:
    path = tmp_path / "c"
    model, optimizer = start("fsdp2", stateful, 0)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3])
    train(model, optimizer)
    scheduler.step()
    plain = {"epoch": 3, "best": {"loss": float("inf"), 2: [1, (2, 3)]}, "rng": torch.get_rng_state()}
    save_checkpoint(path, {"model": model, "scheduler": scheduler, **plain}, sharded=form == "sharded")
    other = torch.optim.lr_scheduler.MultiStepLR(optimizer, [7])
    state: dict[str, Any] = {"model": model, "scheduler": other, **dict.fromkeys(plain)}
    assert load_checkpoint(path, state) == {}
    assert state["scheduler"] is other
    assert other.state_dict() == scheduler.state_dict()
    equal({key: state[key] for key in plain}, plain)
    assert state["best"] == plain["best"]  # a tuple is a tuple


class Longer(Stateful):
    """With a layer more than was saved, and without the scale."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(4, 4)
        del self.scale
        self.register_buffer("cache", torch.full((2,), 3.0), persistent=False)


@pytest.mark.promise(56)
@EACH_FORM
@on_ranks(2)
def test_a_new_layer(tmp_path: Path, form: str) -> None:
    saved = tensors_of(save_run(str(tmp_path / "c"), "fsdp2", sharded=form == "sharded")[0])
    torch.manual_seed(5)
    model = Longer()
    kept = model.extra.weight.detach().clone()
    parallelize_model(model, FSDP2Config())
    before = full_model_state(model, ranks="all")
    differences = "missing: model.extra.weight, model.extra.bias.*\n*.*unexpected: model.scale"
    with pytest.raises(CheckpointKeyError, match=differences):
        load_checkpoint(tmp_path / "c", {"model": model})
    equal(full_model_state(model, ranks="all"), before)
    with pytest.warns(UserWarning, match=differences) as caught:
        load_checkpoint(tmp_path / "c", {"model": model}, strict=False)
    assert len(caught) == 1
    after = full_model_state(model, ranks="all")
    assert torch.equal(after["extra.weight"], kept)
    equal(
        {name: after[name] for name in saved if name != "scale"}, {n: saved[n] for n in saved if n != "scale"}
    )


@pytest.mark.promise(57)
def test_a_raw_state(world2: World, tmp_path: Path) -> None:
    state = stateful(3).state_dict()
    for what, one in {
        "good": state,
        "less": {name: value for name, value in state.items() if name != "scale"},
        "more": {**state, "stray": torch.ones(2)},
        "buffer": {**state, "table": torch.ones(3)},
    }.items():
        torch.save(one, tmp_path / what)
    world2(load_raw, tmp_path)


def load_raw(directory: Path) -> None:
    model, _ = start("fsdp2", stateful, 1)
    load_checkpoint(directory / "good", model)
    equal(full_model_state(model, ranks="all"), torch.load(directory / "good", weights_only=True))
    for what, text in (("less", "missing: the state.scale"), ("more", "unexpected: the state.stray")):
        with pytest.raises(CheckpointKeyError, match=text):
            load_checkpoint(directory / what, model)
    load_checkpoint(directory / "buffer", model)


@on_ranks(2)
def test_shapes_that_differ_are_named(tmp_path: Path) -> None:
    save_run(str(tmp_path / "c"), "fsdp2")
    model = stateful()
    model.layers[0].up = nn.Linear(8, 6)  # type: ignore[union-attr]
    parallelize_model(model, FSDP2Config())
    text = "model.layers.0.up.weight is (5, 8) in the checkpoint, (6, 8) in the model"
    with fails_alike(CheckpointValueError, text):
        load_checkpoint(tmp_path / "c", {"model": model}, strict=False)


@pytest.mark.parametrize(
    ("form", "how"),
    [("sharded", "weights"), ("one file", "weights"), ("sharded", "pretrained"), ("sharded", "load")],
)
@on_ranks(2)
def test_into_a_model_from_meta(tmp_path: Path, form: str, how: str) -> None:
    path = str(tmp_path / "c")
    saved = tensors_of(save_run(path, "fsdp2", sharded=form == "sharded")[0])
    with torch.device("meta"):
        model = Stateful()
    model.table = torch.zeros(3)  # no checkpoint has it, and nothing initializes it
    if how == "weights":
        parallelize_model(model, FSDP2Config(), weights=path)
    elif how == "pretrained":
        load_pretrained(sharded(model), path)
    else:
        load_checkpoint(path, {"model": sharded(model)})
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    equal(tensors_of(full_model_state(model, ranks="all")), saved)


class Evil:
    """Runs code when unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("raise SystemExit('it ran')",))


@on_ranks(2)
def test_no_pickle_runs_unless_asked_for(tmp_path: Path) -> None:
    model, _ = start("fsdp2", stateful, 0)
    save_checkpoint(tmp_path / "c", {"model": model, "evil": Evil()})
    for state in ({"model": model, "evil": None}, None):
        with pytest.raises(CheckpointValueError, match="allow_pickle"):
            load_checkpoint(tmp_path / "c", state)
    with pytest.warns(UserWarning, match="'evil' of the checkpoint is left out") as caught:
        load_checkpoint(tmp_path / "c", {"model": model})
    assert len(caught) == 1


@on_ranks(2)
def test_shards_among_the_values(tmp_path: Path) -> None:
    model, _ = start("fsdp2", stateful, 0)
    averages = {name: parameter.detach() * 2 for name, parameter in model.named_parameters()}
    save_checkpoint(tmp_path / "c", {"model": model, "ema": averages})
    zeros = {name: torch.zeros_like(value) for name, value in averages.items()}
    state: dict[str, Any] = {"model": model, "ema": dict(zeros)}
    load_checkpoint(tmp_path / "c", state)
    assert all(value is zeros[name] for name, value in state["ema"].items())
    equal(*({name: v.full_tensor() for name, v in values.items()} for values in (state["ema"], averages)))
    rows = zeros["layers.0.up.weight"].shape[0]
    state["ema"] = {"layers.0.up.weight": distribute_tensor(torch.zeros(rows, 1), model.scale.device_mesh)}
    load_checkpoint(tmp_path / "c", state)  # of another shape, which is replaced
    equal(state["ema"], {name: value.full_tensor() for name, value in averages.items()})


@pytest.mark.promise(118)
@pytest.mark.parametrize("sharded", [True, False])
@on_ranks(2)
def test_tensors_by_name_are_returned(tmp_path: Path, sharded: bool) -> None:
    model, optimizer = start("fsdp2", stateful, 0)
    values = {"mean": torch.arange(3.0), "std": torch.ones(3)}
    state = {"model": model, "optimizer": optimizer, "normalization": values, "epoch": 3}
    save_checkpoint(tmp_path / "c", state, sharded=sharded)
    for asked in ({"model": model}, {"optimizer": optimizer}):
        rest = load_checkpoint(tmp_path / "c", asked, model=model)
        assert set(rest) == {"normalization", "epoch"}
        equal(rest["normalization"], values)
    save_checkpoint(tmp_path / "d", {"net": model, "normalization": values}, sharded=sharded)
    equal(load_checkpoint(tmp_path / "d", {"net": model})["normalization"], values)


class Broken:
    def state_dict(self) -> dict[str, Any]:
        return {"place": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if dist.get_rank() == 1:
            raise OSError("the disk is gone")


@on_ranks(2)
def test_a_load_that_fails_on_one_rank_leaves_nothing_half_loaded_unnoticed(tmp_path: Path) -> None:
    model, optimizer = start("fsdp2", stateful, 0)
    state = {"model": model, "optimizer": optimizer, "data": Broken()}
    save_checkpoint(tmp_path / "c", state)
    with pytest.raises(ParallelismRuntimeError, match="the disk is gone"):
        load_checkpoint(tmp_path / "c", state)
    _, other = start("fsdp2", stateful, 0)
    other.step()
    for use in (optimizer.step, lambda: load_full_optimizer_state(model, optimizer, {})):
        with pytest.raises(CheckpointRuntimeError, match="AdamW is unusable.*the disk is gone"):
            use()
    with fails_alike(ParallelismRuntimeError, "the disk is gone"):
        full_model_state(model)


@on_ranks(2)
def test_what_cannot_be_read_is_found_before_anything_changes(tmp_path: Path) -> None:
    model, optimizer = start("fsdp2", stateful, 0)
    train(model, optimizer)
    save_checkpoint(tmp_path / "c", {"model": model, "optimizer": optimizer, "odd": Evil()})
    train(model, optimizer)
    before = snapshot(model, optimizer)
    with fails_alike(CheckpointValueError, "odd of ", "is an object that could run code"):
        load_checkpoint(tmp_path / "c", {"model": model, "optimizer": optimizer, "odd": None})
    assert_same(snapshot(model, optimizer), before)
    optimizer.step()


@on_ranks(2)
def test_ranks_that_make_different_calls_all_raise(tmp_path: Path) -> None:
    model, path, rank = start("fsdp2", stateful, 0)[0], tmp_path / "c", dist.get_rank()
    state, own = {"model": model}, stateful().state_dict()
    save_checkpoint(path, {"model": model, "steps": 1})
    for call, text in (
        (lambda: load_checkpoint(path, state | ({"steps": 0} if rank else {})), "load differently"),
        (lambda: load_checkpoint(path, state, verify=bool(rank)), "load differently"),
        (lambda: full_model_state(model, ranks="all" if rank else "zero"), "different options"),
        (lambda: load_full_model_state(model, own, source="all" if rank else "rank0"), "sources"),
        (lambda: load_checkpoint(None if rank else path, state), "Rank 1: There is no"),  # type: ignore[arg-type]
    ):
        with fails_alike(ParallelismError, text):
            call()
    assert load_checkpoint(path, state) == {"steps": 1}
