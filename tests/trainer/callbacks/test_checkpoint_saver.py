"""Checkpoints every so often, and what stays of them."""

import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from composer_dist import FSDP2Config
from composer_dist.checkpoint import load_checkpoint, save_checkpoint
from composer_dist.errors import CheckpointValueError, ParallelismValueError
from composer_dist.trainer import CheckpointSaver, DistributedDataLoader, Trainer
from composer_dist.trainer.state import contents
from tests.kit.compare import equal, weights
from tests.kit.training import classifier, points, quiet
from tests.kit.world import World


def trainer(*savers: CheckpointSaver, **options: Any) -> Trainer:
    options.setdefault("parallelism_config", "fsdp" if dist.is_initialized() else None)
    loader = DistributedDataLoader(points(16), global_batch_size=4, shuffle=True)
    options = {"max_duration": "2ep", "callbacks": savers, "seed": 1, "device": "cpu"} | options
    return quiet(classifier(), train_dataloader=loader, **options)[0]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.is_symlink())


@pytest.mark.promise(100)
@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        ("1ep", ["ep1-ba4", "ep2-ba8"]),
        ("3ba", ["ep0-ba3", "ep1-ba6", "ep2-ba8"]),
        ("0.5dur", ["ep1-ba4", "ep2-ba8"]),
        ("12sp", ["ep0-ba3", "ep1-ba6", "ep2-ba8"]),
        (None, ["ep2-ba8"]),
    ],
)
def test_every_interval_and_at_the_end(tmp_path: Path, interval: Any, expected: list[str]) -> None:
    trainer(CheckpointSaver(tmp_path, interval, keep=None)).fit()
    assert names(tmp_path) == expected
    assert os.readlink(tmp_path / "latest") == expected[-1]


def saved(folder: Path) -> None:
    trainer(CheckpointSaver(folder, "1ba", keep=2)).fit()


@pytest.mark.promise(100)
def test_retention_on_two_ranks(world2: World, tmp_path: Path) -> None:
    world2(saved, tmp_path)
    assert names(tmp_path) == ["ep1-ba7", "ep2-ba8"]
    assert os.readlink(tmp_path / "latest") == "ep2-ba8"


@pytest.mark.promise(100)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_retention_counts_what_a_process_before_has_saved(tmp_path: Path, asynchronous: bool) -> None:
    def saver() -> CheckpointSaver:
        return CheckpointSaver(tmp_path, "1ba", keep=3, asynchronous=asynchronous)

    trainer(saver()).fit(duration="5ba")
    assert names(tmp_path) == ["ep0-ba3", "ep1-ba4", "ep1-ba5"]
    (tmp_path / "notes.txt").write_text("mine")
    trainer(saver(), resume=True).fit(duration="1ba")
    assert names(tmp_path) == ["ep1-ba4", "ep1-ba5", "ep1-ba6", "notes.txt"]


@pytest.mark.promise(100)
def test_a_new_run_keeps_the_checkpoints_of_another_one(tmp_path: Path) -> None:
    first = trainer(CheckpointSaver(tmp_path, "1ba"), max_duration="2ba")
    first.fit()
    first.fit(duration="1ba")  # the same run
    before = names(tmp_path)
    second = trainer(CheckpointSaver(tmp_path, "1ba"), max_duration="1ba")
    with pytest.raises(
        CheckpointValueError, match=r"has checkpoints of another run \(the newest is .*ep0-ba3"
    ):
        second.fit()
    assert names(tmp_path) == before
    (tmp_path / "best").symlink_to("ep0-ba3")
    trainer(CheckpointSaver(tmp_path, "1ba", keep=None, overwrite=True), max_duration="1ba").fit()
    assert sorted(os.listdir(tmp_path)) == ["ep0-ba1", "latest"]


@pytest.mark.promise(100)
def test_a_run_that_was_saved_before_its_first_batch_continues(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "ep0-ba0", contents(trainer().state))  # what SIGTERM saves
    trainer(CheckpointSaver(tmp_path, "1ba", keep=1), resume=True, max_duration="1ba").fit()
    assert names(tmp_path) == ["ep0-ba1"]


def test_a_checkpoint_has_all_of_the_run(tmp_path: Path) -> None:
    trainer(CheckpointSaver(tmp_path, "2ba")).fit(duration="2ba")
    found = load_checkpoint(tmp_path / "latest")
    assert found.keys() >= {"model", "optimizer", "state", "schedulers", "callbacks", "data", "generators"}
    assert found["state"]["timestamp"]["batch"] == 2
    assert found["data"]["ranks"][0]["state"]["samples"] == 8
    assert len(found["generators"]) == 1


def test_latest_is_a_file_where_links_are_impossible(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(Path, "symlink_to", Mock(side_effect=OSError("no links here")))
    trainer(CheckpointSaver(tmp_path)).fit()
    assert (tmp_path / "latest").read_text() == "ep2-ba8"
    assert trainer(CheckpointSaver(tmp_path), resume=tmp_path / "latest").state.timestamp.batch == 8


def test_options_that_cannot_work(tmp_path: Path) -> None:
    for options, message in (
        ({"keep": 0}, "keep=0: the newest checkpoint is always kept"),
        ({"keep": "3"}, "keep='3': the newest checkpoint is always kept"),
        ({"monitor": "loss/eval/total", "save_top_k": 1.5}, "save_top_k must be a positive integer, not 1.5"),
        ({"filename": "model"}, "'model' would be the same for all"),
        ({"filename": "{step}"}, "'step' is unknown"),
        ({"interval": "0ba"}, "CheckpointSaver's interval must be positive"),
    ):
        with pytest.raises(ParallelismValueError, match=message):
            CheckpointSaver(tmp_path, **options)


def full(folder: Path) -> None:
    """Saves single files, resumes from them, and ends as a run with directories does."""
    found = {}
    for kind in ("full", "sharded"):
        options = {"parallelism_config": FSDP2Config(state_dict_type=kind)}
        trainer(CheckpointSaver(folder / kind, "3ba", keep=1), **options).fit(duration="3ba")
        last = trainer(CheckpointSaver(folder / kind, "3ba", keep=1), resume=True, **options)
        assert last.resumed_from == str(folder / kind / "ep0-ba3")
        assert os.path.isfile(last.resumed_from) == (kind == "full")
        last.fit(duration="2ba")
        found[kind] = weights(last.state.model)
        assert names(folder / kind) == ["ep1-ba5"]
    equal(found["full"], found["sharded"])


@pytest.mark.slow
@pytest.mark.promise(118)
def test_state_dict_type_decides_the_form(world2: World, tmp_path: Path) -> None:
    world2(full, tmp_path / "two")
    full(tmp_path / "one")
    options = {"parallelism_config": FSDP2Config(state_dict_type="full")}
    with pytest.raises(ParallelismValueError, match="single files at a URL .memory://"):
        trainer(CheckpointSaver("memory://runs"), **options)
