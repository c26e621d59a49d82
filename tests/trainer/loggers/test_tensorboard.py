"""TensorBoard reads what was logged."""

from pathlib import Path
from typing import Any

import pytest

from composer_dist.trainer import InMemoryLogger, TensorBoardLogger, Trainer
from composer_dist.trainer.loggers.tensorboard import markdown
from tests.kit.training import Table, fitted, fitted_on_parts, loader, quiet
from tests.kit.world import World


def events(path: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(path))
    accumulator.Reload()
    return accumulator


def test_scalars_hyperparameters_and_tables(tmp_path: Path) -> None:
    log = InMemoryLogger()
    options = {"loggers": [TensorBoardLogger(tmp_path), log], "callbacks": Table("a|b", "c\nd")}
    fitted(eval_dataloader=loader(), **options)[0].close()
    found = events(tmp_path)
    losses = found.Scalars("loss/train/total")
    assert [one.step for one in losses] == [1, 2, 3]
    assert [one.value for one in losses] == pytest.approx(log.values("loss/train/total"))
    assert [one.step for one in found.Scalars("metrics/eval/MulticlassAccuracy")] == [3]
    (table,) = found.Tensors("generations/text_summary")
    assert table.step == 3
    assert table.tensor_proto.string_val == [b"| prompt | text |\n| --- | --- |\n| a\\|b | c<br>d |"]
    assert markdown(["a"], [[1.5], ["x"]]) == "| a |\n| --- |\n| 1.5 |\n| x |"
    (hyperparameters,) = found.Tensors("hyperparameters/text_summary")
    assert b"| max_duration | 1ep |" in hyperparameters.tensor_proto.string_val[0]


def test_a_resumed_run_hides_what_it_repeats(tmp_path: Path) -> None:
    def trainer() -> Trainer:
        return quiet(loggers=TensorBoardLogger(tmp_path), train_dataloader=loader(24), max_duration="1ep")[0]

    with trainer() as first:
        first.fit(duration="2ba")
        saved = first.state_dict()
        first.fit(duration="2ba")
    with trainer() as second:
        second.load_state_dict(saved)
        second.fit()
    assert [one.step for one in events(tmp_path).Scalars("loss/train/total")] == [1, 2, 3, 4, 5, 6]


def on_two_ranks(path: Path) -> None:
    fitted_on_parts([3, 3], "fsdp", loggers=TensorBoardLogger(path))[0].close()


def test_rank_0_writes_for_all(world2: World, tmp_path: Path) -> None:
    world2(on_two_ranks, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    assert [one.step for one in events(tmp_path).Scalars("loss/train/total")] == [1, 2, 3, 4]
