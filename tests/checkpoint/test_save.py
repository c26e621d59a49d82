"""What is written, where, and what is refused."""

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from composer_dist.checkpoint import full_model_state, latest_checkpoint, load_checkpoint, save_checkpoint
from composer_dist.checkpoint.storage import local as commit
from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.distributed.prepare import parallelize_model
from composer_dist.errors import CheckpointIsADirectoryError, CheckpointRuntimeError, CheckpointValueError
from tests.kit.compare import equal
from tests.kit.runs import assert_same, load_run, save_run, snapshot, start, train
from tests.kit.toy import stateful
from tests.kit.world import WorkerError, World, run


def save_and_read_plainly(path: str) -> dict[str, Any]:
    model, optimizer = start("fsdp2", stateful, 0)
    train(model, optimizer)
    save_checkpoint(path, {"model": model, "optimizer": optimizer, "steps": 3, "note": {"a": [1, "b"]}})
    full = full_model_state(model, ranks="all")
    empty = {name: torch.zeros_like(v) if isinstance(v, Tensor) else None for name, v in full.items()}
    read = {"model": empty, "steps": 0, "note": {"a": None}}
    dcp.load(read, checkpoint_id=path)
    for name, value in full.items():
        same = torch.equal(value, read["model"][name]) if isinstance(value, Tensor) else True
        assert same, name
    return {"steps": read["steps"], "note": read["note"]}


@pytest.mark.promise(49)
def test_plain_dcp_reads_it(world2: World, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    assert world2(save_and_read_plainly, str(path)) == [{"steps": 3, "note": {"a": [1, "b"]}}] * 2
    names = sorted(file.name for file in path.iterdir())
    assert [name for name in names if not name.endswith(".distcp")] == [".metadata", "checkpoint.json"]
    assert [name.split("_")[2] for name in names if name.endswith(".distcp")] == ["0", "1"]
    newest = max(path.iterdir(), key=lambda file: file.stat().st_mtime_ns)
    assert newest.name == "checkpoint.json"


def save_and_load_part(path: str, sharded: bool) -> dict[str, Any]:
    model, _ = start("fsdp2", stateful, 0)
    values = {"steps": 7, "rng": torch.arange(3), "d": {1: None}}
    save_checkpoint(path, {"model": model, **values}, sharded=sharded)
    state: dict[str, Any] = {"model": model, "steps": 0}
    rest = load_checkpoint(path, state)
    return {"steps": state["steps"], **rest}


@pytest.mark.promise(49)
@pytest.mark.parametrize("sharded", [True, False])
def test_values_are_restored_and_the_rest_returned(world2: World, tmp_path: Path, sharded: bool) -> None:
    for got in world2(save_and_load_part, str(tmp_path / "c"), sharded):
        assert torch.equal(got.pop("rng"), torch.arange(3))
        assert got == {"steps": 7, "d": {1: None}}


@pytest.mark.promise(51)
def test_one_file_that_torch_reads(world2: World, tmp_path: Path) -> None:
    path = str(tmp_path / "c.pt")
    (before, *_), _ = world2(save_run, path, "fsdp2", sharded=False)
    contents = torch.load(path, weights_only=True)
    assert list(contents) == ["model", "optimizer", "steps"]
    equal(contents["model"], before)
    plain = stateful()
    plain.load_state_dict(contents["model"])
    head = contents["model"]["head.weight"]
    assert head.data_ptr() == contents["model"]["embed.weight"].data_ptr(), "ties are stored once"
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None, "unzip does not warn"


def save_into(path: str, sharded: bool) -> Any:
    model, _ = start("fsdp2", stateful, 0)
    save_checkpoint(path, {"model": model}, sharded=sharded)


def refused_into(path: str) -> str:
    with pytest.raises(CheckpointIsADirectoryError) as caught:
        save_into(path, sharded=False)
    assert isinstance(caught.value, IsADirectoryError)
    return str(caught.value)


@pytest.mark.promise(52)
def test_a_file_does_not_replace_a_directory_of_other_things(world2: World, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    first, second = world2(refused_into, str(tmp_path / "mine"))
    assert first == second
    assert "is a directory" in first
    assert os.listdir(tmp_path) == ["mine"]
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "x"


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


def save_many(path: str) -> int:
    model, _ = start("fsdp2", stateful, 0)
    for number in range(20):
        save_checkpoint(path, {"model": model, "number": number}, sharded=number % 3 > 0)
        assert load_checkpoint(path, {"number": None} | {"model": model}) == {}
    return int(load_checkpoint(path)["number"])


@pytest.mark.promise(52)
@pytest.mark.slow
def test_twenty_times(world2: World, tmp_path: Path) -> None:
    assert world2(save_many, str(tmp_path / "c"), timeout=120) == [19, 19]


def is_bias(name: str, value: Any) -> bool:
    return "bias" in name


def save_filtered(path: str, sharded: bool) -> list[str]:
    model, _ = start("fsdp2", stateful, 0)
    save_checkpoint(path, {"model": model, "steps": 1}, sharded=sharded, filter=is_bias)
    save_checkpoint(path + "2", {"model": model, "steps": 1}, sharded=sharded, filter={"model": is_bias})
    assert list(load_checkpoint(path + "2")["model"]) == list(load_checkpoint(path)["model"])
    return list(load_checkpoint(path)["model"])


@pytest.mark.promise(53)
@pytest.mark.parametrize("sharded", [True, False])
def test_a_filter(world2: World, tmp_path: Path, sharded: bool) -> None:
    expected = [name for name in stateful().state_dict() if "bias" in name]
    assert world2(save_filtered, str(tmp_path / "c"), sharded) == [expected] * 2


def refused(path: str) -> dict[str, str]:
    found: dict[str, str] = {}

    def attempt(what: str, call: Callable[[], Any], kind: type[Exception] = CheckpointValueError) -> None:
        with pytest.raises(kind) as caught:
            call()
        assert isinstance(caught.value, ValueError)
        found[what] = str(caught.value)

    model, optimizer = start("fsdp2", stateful, 0)
    attempt("empty", lambda: save_checkpoint(path, {}))
    attempt("no model", lambda: save_checkpoint(path, {"x": 1}))
    attempt("no parallel", lambda: save_checkpoint(path, {"model": nn.Linear(2, 2)}))
    attempt("bare optimizer", lambda: save_checkpoint(path, {"optimizer": optimizer}))
    attempt("filter", lambda: save_checkpoint(path, {"model": model}, filter={"modle": is_bias}))
    attempt("pickle", lambda: save_checkpoint(path, {"model": model, "f": lambda: 1}))
    attempt("collision", lambda: save_checkpoint(path, {"model": model, "a.b": 1, "a": {"b": 2}}))
    os.makedirs(path + "empty", exist_ok=True)
    attempt("empty directory", lambda: load_checkpoint(path + "empty", {"model": model}))
    attempt("nothing there", lambda: load_checkpoint(path + "none", {"model": model}))
    save_checkpoint(path, {"optimizer": optimizer}, model=model)
    assert load_checkpoint(path, {"optimizer": optimizer}, model=model) == {}
    attempt("directory to raw", lambda: load_checkpoint(path, model))
    return found


@pytest.mark.promise(54)
def test_what_is_refused(world2: World, tmp_path: Path) -> None:
    first, second = world2(refused, str(tmp_path / "c"))
    assert first == second
    words = {
        "empty": "nothing to save",
        "no model": "The state has no model",
        "no parallel": "parallelize_model",
        "bare optimizer": "model=",
        "filter": "modle",
        "pickle": "pickled",
        "collision": "a.b",
        "empty directory": "not a valid checkpoint",
        "nothing there": "no checkpoint",
        "directory to raw": "directory",
    }
    for what, word in words.items():
        assert word in first[what], first[what]
    assert sorted(os.listdir(tmp_path)) == ["c", "cempty"]


def save_two(path: str) -> None:
    one, opt = start("fsdp2", stateful, 0)
    two = nn.Sequential(nn.Linear(4, 3))
    other = torch.optim.SGD(two.parameters(), lr=0.1, momentum=0.9)
    parallelize_model(two, FSDP2Config(), other)
    two(torch.ones(1, 4)).sum().backward()
    other.step()
    before = full_model_state(two, ranks="all"), snapshot(two, other)
    state = {"one": one, "two": two, "opt": opt, "other": other}
    save_checkpoint(path, state)
    with torch.no_grad():
        for parameter in two.parameters():
            parameter.zero_()
    load_checkpoint(path, state)
    equal(full_model_state(two, ranks="all"), before[0])
    assert_same(snapshot(two, other), before[1])


@pytest.mark.promise(54)
def test_two_models_and_two_optimizers(world2: World, tmp_path: Path) -> None:
    world2(save_two, str(tmp_path / "c"))


def unwritable(path: str) -> str:
    model, _ = start("fsdp2", stateful, 0)
    with pytest.raises(CheckpointRuntimeError) as caught:
        save_checkpoint(path, {"model": model})
    return str(caught.value)


def save_differently(path: str) -> str:
    model, _ = start("fsdp2", stateful, 0)
    extra = {"extra": 1} if torch.distributed.get_rank() else {}
    with pytest.raises(CheckpointValueError) as caught:
        save_checkpoint(path, {"model": model, **extra})
    return str(caught.value)


def hide_shards(path: str) -> str:
    model, _ = start("fsdp2", stateful, 0)
    with pytest.raises(CheckpointValueError) as caught:
        save_checkpoint(path, {"model": model, "hidden": (1, model.scale.detach())})
    return str(caught.value)


@pytest.mark.parametrize(
    ("attempt", "text"),
    [
        (unwritable, "Cannot save to"),
        (save_differently, "extra"),
        (hide_shards, "hidden: shards in a tuple or a set"),
    ],
)
def test_both_ranks_raise_the_same(world2: World, tmp_path: Path, attempt: Any, text: str) -> None:
    if attempt is unwritable:
        (tmp_path / "file").write_text("")
    first, second = world2(attempt, str(tmp_path / "file" / "c" if attempt is unwritable else tmp_path / "c"))
    assert first == second
    assert text in first
    assert os.listdir(tmp_path) == (["file"] if attempt is unwritable else [])


def crash_before_rename(path: str) -> None:
    model, _ = start("fsdp2", stateful, 1)
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
@pytest.mark.parametrize("sharded", [True, False])
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


def save_elsewhere(directory: str) -> list[str]:
    rank = torch.distributed.get_rank()
    model, _ = start("fsdp2", stateful, 0)
    save_checkpoint(f"{directory}/{rank}", {"model": model})
    load_checkpoint(f"{directory}/{rank}", {"model": model})
    return os.listdir(directory)


@pytest.mark.promise(59)
def test_rank_0_says_where(world2: World, tmp_path: Path) -> None:
    assert world2(save_elsewhere, str(tmp_path)) == [["0"], ["0"]]


def save_and_keep(directory: str) -> list[str]:
    model, _ = start("fsdp2", stateful, 0)
    for number in range(4):
        sharded = number != 2
        save_checkpoint(f"{directory}/{number}", {"model": model}, keep=2, sharded=sharded)
    return sorted(os.listdir(directory))


def test_retention(world2: World, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "log.txt").write_text("x")
    world2(save_and_keep, str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["2", "3", "log.txt", "other"]


def odd_values() -> dict[str, Any]:
    """What is neither a tensor by itself nor plain."""
    return {
        "tuple": (1, torch.arange(3.0), [torch.ones(2)]),
        "set": {1, 2},
        "array": np.arange(4.0),
        "conjugated": torch.tensor([1 + 2j]).conj(),
        "negated": torch.tensor([1 + 2j]).conj().imag,
        "expanded": torch.ones(1).expand(3, 5),
        "turned": torch.arange(6.0).view(2, 3).t(),
        "empty": torch.empty(0, 3),
        "nan": float("nan"),
        1: "a number for a key",
    }


@pytest.mark.parametrize("sharded", [True, False])
def test_values_of_every_kind_come_back(tmp_path: Path, sharded: bool) -> None:
    save_checkpoint(tmp_path / "c", {"model": stateful(), "odd": odd_values()}, sharded=sharded)
    found, expected = load_checkpoint(tmp_path / "c", {"model": stateful()})["odd"], odd_values()
    assert list(found) == list(expected)
    assert found["tuple"][0] == 1
    assert type(found["tuple"][1]) is Tensor, "with values"
    assert torch.equal(found["tuple"][1], expected["tuple"][1])
    assert torch.equal(found["tuple"][2][0], expected["tuple"][2][0])
    assert found["set"] == {1, 2}
    assert np.array_equal(found["array"], expected["array"])
    for key in ("conjugated", "negated", "expanded", "turned", "empty"):
        assert torch.equal(found[key], expected[key]), key
    assert str(found["nan"]) == "nan"


@pytest.mark.parametrize("sharded", [True, False])
def test_what_cannot_be_stored_is_named(tmp_path: Path, sharded: bool) -> None:
    for value, text in (
        ({"x": torch.eye(3).to_sparse()}, r"odd\.x: sparse, nested or quantized"),
        (torch.empty(2, device="meta"), "odd: on the meta device"),
        (lambda: 0, "cannot be pickled"),
    ):
        with pytest.raises(CheckpointValueError, match=text):
            save_checkpoint(tmp_path / "c", {"model": stateful(), "odd": value}, sharded=sharded)
    for given, options, text in (
        (stateful(), {}, "must be a mapping, not a Stateful"),
        ({"model": stateful()}, {"filter": 3}, "must be a function"),
        ({"model": stateful()}, {"keep": 0}, "keep=0"),
    ):
        with pytest.raises(CheckpointValueError, match=text):
            save_checkpoint(tmp_path / "c", given, sharded=sharded, **options)  # type: ignore[arg-type]
    with pytest.raises(CheckpointValueError, match="path of the checkpoint is empty"):
        save_checkpoint("", {"model": stateful()})
    assert os.listdir(tmp_path) == []


def differ(path: str, sharded: bool) -> set[float]:
    model, _ = start("fsdp2", stateful, 0)
    rank = float(dist.get_rank())
    model.shift.fill_(rank)
    own = {str(number): torch.full((9, number + 1), rank) for number in range(5)}
    save_checkpoint(path, {"model": model, "own": own}, sharded=sharded)
    model.shift.fill_(7)
    state: dict[str, Any] = {"model": model, "own": {}}
    load_checkpoint(path, state)
    return {float(value) for one in (*state["own"].values(), model.shift) for value in one.flatten()}


@pytest.mark.parametrize("sharded", [True, False])
def test_of_what_may_differ_the_first_rank_s_values_count(
    world2: World, tmp_path: Path, sharded: bool
) -> None:
    assert world2(differ, str(tmp_path / "c"), sharded) == [{0.0}, {0.0}]
