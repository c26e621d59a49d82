"""The best checkpoints stay, and checkpoints without optimizers lead to no wrong training."""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from composer_dist.checkpoint import load_checkpoint
from composer_dist.errors import CheckpointRuntimeError, ParallelismKeyError, ParallelismValueError
from composer_dist.trainer import CheckpointSaver, Resume
from composer_dist.trainer.callbacks import checkpoint_saver
from tests.kit.compare import weights
from tests.kit.training import Scores, fitted, loader, quiet
from tests.kit.world import World
from tests.trainer.callbacks.test_checkpoint_saver import names

SCORE = "metrics/eval/score"


def scored(folder: Path, *values: float, **options: Any) -> dict[str, Any]:
    """A run of one batch an epoch with these scores; its arguments."""
    settings: dict[str, Any] = {"keep": 1, "monitor": SCORE, "filename": "ep{epoch}"} | options
    callbacks = [Scores(*values), CheckpointSaver(folder, **settings)]
    data = {"train_dataloader": loader(4), "eval_dataloader": loader(4)}
    return data | {"callbacks": callbacks, "max_duration": f"{len(values)}ep"}


@pytest.mark.promise(127)
@pytest.mark.parametrize(
    ("options", "kept", "best"),
    [
        ({}, ["ep2", "ep5"], "ep2"),
        ({"save_top_k": 2}, ["ep2", "ep4", "ep5"], "ep2"),
        ({"mode": "min"}, ["ep3", "ep5"], "ep3"),
        ({"keep": 2}, ["ep2", "ep4", "ep5"], "ep2"),
        ({"keep": None}, ["ep1", "ep2", "ep3", "ep4", "ep5"], "ep2"),
        ({"asynchronous": False}, ["ep2", "ep5"], "ep2"),
    ],
)
def test_the_best_ones_stay_beside_the_newest(
    tmp_path: Path, options: Any, kept: list[str], best: str
) -> None:
    fitted(**scored(tmp_path, 2.0, 5.0, 1.0, 4.0, float("nan"), **options))
    assert names(tmp_path) == kept
    assert os.readlink(tmp_path / "best") == best
    assert os.readlink(tmp_path / "latest") == "ep5"


def on_ranks(folder: Path) -> None:
    fitted(parallelism_config="fsdp", check_sampler=False, **scored(folder, 1.0, 3.0, 2.0))


@pytest.mark.promise(127)
def test_ranks_agree_on_the_best_one(world2: World, tmp_path: Path) -> None:
    world2(on_ranks, tmp_path)
    assert names(tmp_path) == ["ep2", "ep3"]
    assert os.readlink(tmp_path / "best") == "ep2"


@pytest.mark.promise(127)
def test_a_later_process_remembers_the_best_one(tmp_path: Path) -> None:
    fitted(**scored(tmp_path, 5.0, 1.0))
    arguments = scored(tmp_path, 2.0, 3.0)
    fitted(**arguments | {"max_duration": "4ep", "resume": True})
    assert names(tmp_path) == ["ep1", "ep4"]
    assert os.readlink(tmp_path / "best") == "ep1"


def test_a_checkpoint_that_could_not_be_saved_is_not_the_best(tmp_path: Path) -> None:
    save = checkpoint_saver.save_checkpoint

    def full(path: str, *args: Any, **options: Any) -> Any:
        if path.endswith("ep2"):
            raise CheckpointRuntimeError("the disk is full")
        return save(path, *args, **options)

    with mock.patch.object(checkpoint_saver, "save_checkpoint", full):
        fitted(**scored(tmp_path, 1.0, 9.0, 2.0, 0.0))
    assert names(tmp_path) == ["ep3", "ep4"]
    assert os.readlink(tmp_path / "best") == "ep3"


def test_a_value_counts_for_the_weights_that_were_evaluated(tmp_path: Path, caplog: Any) -> None:
    arguments = scored(tmp_path, 1.0, 2.0, interval="3ba", filename="ba{batch}", keep=None)
    fitted(**arguments | {"train_dataloader": loader(8), "max_duration": "2ep"})
    assert names(tmp_path) == ["ba3", "ba4"]
    assert (
        os.readlink(tmp_path / "best") == "ba4"
    )  # the second evaluation is after batch 4, the first after 2


def test_a_run_without_measured_checkpoints_says_so(tmp_path: Path, caplog: Any) -> None:
    arguments = scored(tmp_path, 1.0, 2.0, interval="1ba", filename="ba{batch}")
    del arguments["callbacks"][0]
    saver = arguments["callbacks"][0]
    trainer, _ = quiet(**arguments | {"eval_interval": None, "max_duration": "1ba"})
    trainer.logger.log_metrics({SCORE: 1.0})
    trainer.fit()
    assert f"none is the best by {SCORE}" in caplog.text
    assert not (tmp_path / "best").exists()
    assert saver.state_dict() == {"values": {}}


def test_a_metric_that_nothing_logs_is_named(tmp_path: Path) -> None:
    arguments = scored(tmp_path, 1.0, monitor="metrics/eval/scone")
    with pytest.raises(
        ParallelismKeyError, match=r"no metric 'metrics/eval/scone'. Did you mean 'metrics/eval/score'"
    ):
        fitted(**arguments)
    with pytest.raises(ParallelismValueError, match="save_top_k must be a positive integer, not 0"):
        CheckpointSaver(tmp_path, monitor=SCORE, save_top_k=0)
    with pytest.raises(ParallelismValueError, match="mode and save_top_k need a monitor"):
        CheckpointSaver(tmp_path, save_top_k=3)


@pytest.mark.promise(128)
@pytest.mark.parametrize(
    ("weights_only", "without"), [(True, ["ep1", "ep2"]), ("final", ["ep2"]), (False, [])]
)
def test_optimizers_are_left_out(tmp_path: Path, weights_only: Any, without: list[str]) -> None:
    saver = CheckpointSaver(tmp_path, filename="ep{epoch}", weights_only=weights_only)
    trainer, _ = fitted(callbacks=saver, max_duration="2ep")
    found = {name: load_checkpoint(tmp_path / name) for name in ("ep1", "ep2")}
    assert [name for name, one in found.items() if "optimizer" not in one] == without
    expected = weights(trainer.state.model)
    assert all(torch.equal(found["ep2"]["model"][name], value) for name, value in expected.items())


@pytest.mark.promise(128)
def test_the_last_checkpoint_is_final_if_a_run_stops_early(tmp_path: Path) -> None:
    class Stop(CheckpointSaver):
        def batch_end(self, state: Any, logger: Any) -> None:
            if state.timestamp.batch == 3:
                state.stop_training()

    fitted(callbacks=Stop(tmp_path, filename="ep{epoch}", weights_only="final"), max_duration="2ep")
    assert "optimizer" not in load_checkpoint(tmp_path / "ep1")


@pytest.mark.promise(128)
def test_a_run_does_not_train_on_without_the_states_of_its_optimizers(tmp_path: Path) -> None:
    def saver() -> CheckpointSaver:
        return CheckpointSaver(tmp_path, filename="ep{epoch}", weights_only="final")

    first, _ = fitted(callbacks=saver(), max_duration="2ep")
    again, _ = fitted(callbacks=saver(), max_duration="2ep", resume=True)  # it has nothing to do
    assert again.state.timestamp.epoch == 2
    with pytest.raises(ParallelismValueError, match=r"ep2 has no states of the optimizers \(weights_only\)"):
        fitted(callbacks=saver(), max_duration="3ep", resume=True)
    anew = Resume(load_path=tmp_path / "ep2", load_ignore_keys=["optimizer*"])
    fitted(max_duration="3ep", resume=anew)
    earlier, _ = quiet(resume=tmp_path / "ep1", train_dataloader=loader(), max_duration="2ep")
    earlier.fit()
    for name, value in weights(first.state.model).items():
        assert torch.equal(weights(earlier.state.model)[name], value)
