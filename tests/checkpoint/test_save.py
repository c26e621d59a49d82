"""What is written, where, and what is refused."""

import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from composer_dist._torch import get_default_store
from composer_dist.checkpoint import full_model_state, latest_checkpoint, load_checkpoint, save_checkpoint
from composer_dist.checkpoint.storage import local as commit
from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.distributed.prepare import parallelize_model
from composer_dist.errors import CheckpointIsADirectoryError, CheckpointRuntimeError, CheckpointValueError
from tests.kit.compare import equal, fails_alike, tensors_of
from tests.kit.runs import assert_same, load_run, save_run, snapshot, start, train
from tests.kit.toy import Stateful, stateful
from tests.kit.world import WorkerError, World, on_ranks, run

EACH_FORM = pytest.mark.parametrize("sharded", [True, False])


def parallel(seed: int = 0) -> Stateful:
    return parallelize_model(stateful(seed), FSDP2Config()).model


@pytest.mark.promise(49)
@on_ranks(2)
def test_plain_dcp_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    model, optimizer = start("fsdp2", stateful, 0)
    train(model, optimizer)
    values = {"steps": 3, "note": {"a": [1, "b"]}}
    save_checkpoint(path, {"model": model, "optimizer": optimizer, **values})
    tensors = tensors_of(full_model_state(model, ranks="all"))
    read = {
        "model": {name: torch.zeros_like(v) for name, v in tensors.items()},
        "steps": 0,
        "note": {"a": None},
    }
    dcp.load(read, checkpoint_id=path)
    equal(read, {"model": tensors, **values})
    names = sorted(file.name for file in path.iterdir())
    assert [name for name in names if not name.endswith(".distcp")] == [".metadata", "checkpoint.json"]
    assert [name.split("_")[2] for name in names if name.endswith(".distcp")] == ["0", "1"]
    written = {file.name: file.stat().st_mtime_ns for file in path.iterdir()}
    assert written["checkpoint.json"] == max(written.values()), "the last one, in the clock's steps"


@pytest.mark.promise(49)
@EACH_FORM
@on_ranks(2)
def test_values_are_restored_and_the_rest_returned(tmp_path: Path, sharded: bool) -> None:
    model = parallel()
    values = {"steps": 7, "rng": torch.arange(3), "d": {1: None}}
    save_checkpoint(tmp_path / "c", {"model": model, **values}, sharded=sharded)
    state: dict[str, Any] = {"model": model, "steps": 0}
    rest = load_checkpoint(tmp_path / "c", state)
    equal({"steps": state["steps"], **rest}, values)


@pytest.mark.promise(51)
def test_one_file_that_torch_reads(world2: World, tmp_path: Path) -> None:
    path = str(tmp_path / "c.pt")
    (before, *_), _ = world2(save_run, path, "fsdp2", sharded=False)
    contents = torch.load(path, weights_only=True)
    assert list(contents) == ["model", "optimizer", "steps"]
    equal(contents["model"], before)
    stateful().load_state_dict(contents["model"])
    head = contents["model"]["head.weight"]
    assert head.data_ptr() == contents["model"]["embed.weight"].data_ptr(), "ties are stored once"
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None, "unzip does not warn"


@pytest.mark.promise(52)
@on_ranks(2)
def test_a_file_does_not_replace_a_directory_of_other_things(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(exist_ok=True)
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    assert issubclass(CheckpointIsADirectoryError, IsADirectoryError)
    with fails_alike(CheckpointIsADirectoryError, "is a directory"):
        save_checkpoint(tmp_path / "mine", {"model": parallel()}, sharded=False)
    assert os.listdir(tmp_path) == ["mine"]
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "x"


def save_into(path: str, sharded: bool) -> None:
    save_checkpoint(path, {"model": parallel()}, sharded=sharded)


@pytest.mark.promise(52)
def test_each_form_replaces_the_other_and_foreign_files_stay(world2: World, tmp_path: Path) -> None:
    path = tmp_path / "c"
    path.mkdir()
    (path / "notes.txt").write_text("keep me")
    for _ in range(2):
        world2(save_into, str(path), True)
        assert (path / "notes.txt").read_text() == "keep me"
        assert len(list(path.glob("*.distcp"))) == 2
        (path / "__0_0deadbed.distcp").write_text("of a save that was killed")
    world2(save_into, str(path), False)
    assert path.is_file()
    world2(save_into, str(path), True)
    assert (path / "checkpoint.json").is_file()
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.promise(52)
@pytest.mark.slow
@on_ranks(2, timeout=120)
def test_twenty_times(tmp_path: Path) -> None:
    model, path = parallel(), tmp_path / "c"
    for number in range(20):
        save_checkpoint(path, {"model": model, "number": number}, sharded=number % 3 > 0)
        assert load_checkpoint(path, {"number": None, "model": model}) == {}
    assert load_checkpoint(path)["number"] == 19


@pytest.mark.promise(108)
@on_ranks(2)
def test_the_store_does_not_grow_with_the_number_of_saves(tmp_path: Path) -> None:
    (model, optimizer), store = start("fsdp2", stateful, 0), get_default_store()
    counts = []
    for number in range(12):
        state = {"model": model, "optimizer": optimizer, "number": number}
        saving = save_checkpoint(tmp_path / "c", state, sharded=number % 4 > 0, asynchronous=number % 4 > 1)
        if saving is not None:
            saving.wait()
        if number % 4 == 3:
            dist.barrier()
            counts.append(store.num_keys())
            dist.barrier()
    assert counts[0] >= counts[1] == counts[2]


@pytest.mark.promise(53)
@EACH_FORM
@on_ranks(2)
def test_a_filter(tmp_path: Path, sharded: bool) -> None:
    def is_bias(name: str, value: Any) -> bool:
        return "bias" in name

    state = {"model": parallel(), "steps": 1}
    for given in (is_bias, {"model": is_bias}):
        save_checkpoint(tmp_path / "c", state, sharded=sharded, filter=given)
        found = load_checkpoint(tmp_path / "c")["model"]
        assert list(found) == [name for name in stateful().state_dict() if "bias" in name]


@pytest.mark.promise(54)
@on_ranks(2)
def test_what_is_refused(tmp_path: Path) -> None:
    path, empty = tmp_path / "c", tmp_path / "empty"
    empty.mkdir(exist_ok=True)
    model, optimizer = start("fsdp2", stateful, 0)
    assert issubclass(CheckpointValueError, ValueError)
    for call, text in (
        (lambda: save_checkpoint(path, {}), "nothing to save"),
        (lambda: save_checkpoint(path, {"x": 1}), "The state has no model"),
        (lambda: save_checkpoint(path, {"model": nn.Linear(2, 2)}), "parallelize_model"),
        (lambda: save_checkpoint(path, {"optimizer": optimizer}), "model="),
        (lambda: save_checkpoint(path, {"model": model}, filter={"modle": all}), "modle"),
        (lambda: save_checkpoint(path, {"model": model, "f": lambda: 1}), "pickled"),
        (lambda: save_checkpoint(path, {"model": model, "a.b": 1, "a": {"b": 2}}), "a.b"),
        (lambda: load_checkpoint(empty, {"model": model}), "not a valid checkpoint"),
        (lambda: load_checkpoint(tmp_path / "none", {"model": model}), "no checkpoint"),
    ):
        with fails_alike(CheckpointValueError, text):
            call()
    save_checkpoint(path, {"optimizer": optimizer}, model=model)
    assert load_checkpoint(path, {"optimizer": optimizer}, model=model) == {}
    with fails_alike(CheckpointValueError, "directory"):
        load_checkpoint(path, model)
    assert sorted(os.listdir(tmp_path)) == ["c", "empty"]


@pytest.mark.promise(54)
@on_ranks(2)
def test_two_models_and_two_optimizers(tmp_path: Path) -> None:
    one, opt = start("fsdp2", stateful, 0)
    two = nn.Sequential(nn.Linear(4, 3))
    other = torch.optim.SGD(two.parameters(), lr=0.1, momentum=0.9)
    parallelize_model(two, FSDP2Config(), other)
    two(torch.ones(1, 4)).sum().backward()
    other.step()
    before = snapshot(two, other)
    state = {"one": one, "two": two, "opt": opt, "other": other}
    save_checkpoint(tmp_path / "c", state)
    with torch.no_grad():
        for parameter in two.parameters():
            parameter.zero_()
    load_checkpoint(tmp_path / "c", state)
    assert_same(snapshot(two, other), before)


@on_ranks(2)
def test_both_ranks_raise_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model, extra = parallel(), {"extra": 1} if dist.get_rank() else {}
    with fails_alike(CheckpointRuntimeError, "Cannot save to"):
        save_checkpoint(tmp_path / "file" / "c", {"model": model})
    with fails_alike(CheckpointValueError, "extra"):
        save_checkpoint(tmp_path / "c", {"model": model, **extra})
    with fails_alike(CheckpointValueError, "hidden: shards in a tuple or a set"):
        save_checkpoint(tmp_path / "c", {"model": model, "hidden": (1, model.scale.detach())})
    assert os.listdir(tmp_path) == ["file"]


def crash_before_rename(path: str) -> None:
    model = parallel(1)
    commit.put_in_place = lambda aside, path: os._exit(9)  # type: ignore[assignment]
    save_checkpoint(path, {"model": model, "steps": 2})


@pytest.mark.promise(59)
def test_a_crash_before_the_rename_leaves_the_old_one(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    before = run(save_run, 2, path, "fsdp2")[0]
    with pytest.raises(WorkerError):
        run(crash_before_rename, 2, path, timeout=30)
    assert len(os.listdir(tmp_path)) == 2, "what was written aside is still there"
    assert_same(run(load_run, 2, path, "fsdp2")[0], before)
    run(save_run, 2, path, "fsdp2")
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.promise(59)
@EACH_FORM
def test_a_crash_between_the_renames_of_an_exchange_leaves_the_old_one(tmp_path: Path, sharded: bool) -> None:
    state = {"model": stateful()}
    path, aside = tmp_path / "c", tmp_path / ".c.0badc0de.old"
    save_checkpoint(path, {**state, "number": 1}, sharded=sharded)
    path.rename(aside)
    assert latest_checkpoint(tmp_path) == str(path)
    assert load_checkpoint(path)["number"] == 1
    save_checkpoint(tmp_path / "d", {**state, "number": 2}, keep=2)
    assert latest_checkpoint(tmp_path) == str(tmp_path / "d")
    assert load_checkpoint(path)["number"] == 1, "retention counts it"
    save_checkpoint(path, {**state, "number": 3}, sharded=not sharded)
    assert load_checkpoint(path)["number"] == 3
    assert sorted(os.listdir(tmp_path)) == ["c", "d"]
    path.rename(aside)
    save_checkpoint(tmp_path / "d", {**state, "number": 4}, keep=1)
    assert os.listdir(tmp_path) == ["d"]


@pytest.mark.promise(59)
@on_ranks(2)
def test_rank_0_says_where(tmp_path: Path) -> None:
    state, path = {"model": parallel()}, tmp_path / str(dist.get_rank())
    save_checkpoint(path, state)
    load_checkpoint(path, state)
    assert os.listdir(tmp_path) == ["0"]


@on_ranks(2)
def test_retention(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir(exist_ok=True)
    (tmp_path / "log.txt").write_text("x")
    state = {"model": parallel()}
    for number in range(4):
        save_checkpoint(tmp_path / str(number), state, keep=2, sharded=number != 2)
    assert sorted(os.listdir(tmp_path)) == ["2", "3", "log.txt", "other"]


@EACH_FORM
def test_values_of_every_kind_come_back(tmp_path: Path, sharded: bool) -> None:
    expected: dict[Any, Any] = {
        "tuple": (1, torch.arange(3.0), [torch.ones(2)]),
        "array": np.arange(4.0),
        "nan": float("nan"),
        "set": {1, 2},
        "conjugated": torch.tensor([1 + 2j]).conj(),
        "negated": torch.tensor([1 + 2j]).conj().imag,
        "expanded": torch.ones(1).expand(3, 5),
        "turned": torch.arange(6.0).view(2, 3).t(),
        "empty": torch.empty(0, 3),
        1: "a number for a key",
    }
    save_checkpoint(tmp_path / "c", {"model": stateful(), "odd": expected}, sharded=sharded)
    found = load_checkpoint(tmp_path / "c", {"model": stateful()})["odd"]
    assert list(found) == list(expected)
    equal(list(found.pop("tuple")), list(expected.pop("tuple")))
    assert np.array_equal(found.pop("array"), expected.pop("array"))
    assert str(found.pop("nan")) == str(expected.pop("nan"))
    equal(found, expected)


@EACH_FORM
def test_what_cannot_be_stored_is_named(tmp_path: Path, sharded: bool) -> None:
    path, model = tmp_path / "c", stateful()
    for given, text in (
        ({"model": model, "odd": {"x": torch.eye(3).to_sparse()}}, r"odd\.x: sparse, nested or quantized"),
        ({"model": model, "odd": torch.empty(2, device="meta")}, "odd: on the meta device"),
        ({"model": model, "odd": lambda: 0}, "cannot be pickled"),
        (model, "must be a mapping, not a Stateful"),
    ):
        with pytest.raises(CheckpointValueError, match=text):
            save_checkpoint(path, given, sharded=sharded)  # type: ignore[arg-type]
    for given, options, text in (
        (path, {"filter": 3}, "must be a function"),
        (path, {"keep": 0}, "keep=0"),
        ("", {}, "path of the checkpoint is empty"),
    ):
        with pytest.raises(CheckpointValueError, match=text):
            save_checkpoint(given, {"model": model}, sharded=sharded, **options)
    assert os.listdir(tmp_path) == []


@EACH_FORM
@on_ranks(2)
def test_of_what_may_differ_the_first_rank_s_values_count(tmp_path: Path, sharded: bool) -> None:
    model, rank = parallel(), float(dist.get_rank())
    model.shift.fill_(rank)
    own = {str(number): torch.full((9, number + 1), rank) for number in range(5)}
    save_checkpoint(tmp_path / "c", {"model": model, "own": own}, sharded=sharded)
    model.shift.fill_(7)
    state: dict[str, Any] = {"model": model, "own": {}}
    load_checkpoint(tmp_path / "c", state)
    assert all((value == 0).all() for value in (*state["own"].values(), model.shift))


class Renaming(nn.Linear):
    """Saves its weight under another name."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}kernel"] = self.weight if keep_vars else self.weight.detach()


def hooked(rename: bool) -> nn.Module:
    model = nn.Linear(2, 2)

    def change(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        weight = state.pop(f"{prefix}weight")
        state[f"{prefix}{'kernel' if rename else 'weight'}"] = weight if rename else weight * 2

    model.register_state_dict_post_hook(change)  # type: ignore[no-untyped-call]
    return model


@pytest.mark.promise(118)
@EACH_FORM
def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path, sharded: bool) -> None:
    for model, name in ((Renaming(2, 2), "kernel"), (hooked(True), "kernel"), (hooked(False), "weight")):
        with pytest.raises(CheckpointValueError, match=f"could not be loaded: {name}"):
            save_checkpoint(tmp_path / "c", {"model": model}, sharded=sharded)
    assert list(tmp_path.iterdir()) == []
