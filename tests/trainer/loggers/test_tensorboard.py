"""TensorBoard reads what was logged."""

from pathlib import Path
from typing import Any

import pytest

from composer_dist.trainer import TensorBoardLogger
from composer_dist.trainer.loggers.tensorboard import markdown
from tests.kit.training import At, Table, classifier, loader, on_parts, quiet
from tests.kit.world import World


def events(path: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(path))
    accumulator.Reload()
    return accumulator


def test_scalars_hyperparameters_and_tables(tmp_path: Path) -> None:
    trainer, _ = quiet(
        classifier(),
        loggers=TensorBoardLogger(tmp_path),
        callbacks=Table("a|b", "c\nd"),
        train_dataloader=loader(),
        eval_dataloader=loader(),
        max_duration="1ep",
    )
    values: list[float] = []
    trainer.callbacks.append(
        At(batch_end=lambda state: values.append(float(state.metric_values["loss/train/total"])))
    )
    with trainer:
        trainer.fit()
    found = events(tmp_path)
    losses = found.Scalars("loss/train/total")
    assert [one.step for one in losses] == [1, 2, 3]
    assert [one.value for one in losses] == pytest.approx(values)
    assert [one.step for one in found.Scalars("metrics/eval/MulticlassAccuracy")] == [3]
    (table,) = found.Tensors("generations/text_summary")
    assert table.step == 3
    assert table.tensor_proto.string_val == [b"| prompt | text |\n| --- | --- |\n| a\\|b | c<br>d |"]
    (hyperparameters,) = found.Tensors("hyperparameters/text_summary")
    assert b"| max_duration | 1ep |" in hyperparameters.tensor_proto.string_val[0]


def test_a_resumed_run_hides_what_it_repeats(tmp_path: Path) -> None:
    saved: dict[str, Any] = {}

    def save(state: Any) -> None:
        if state.timestamp.batch == 2:
            saved.update(first.state_dict())

    options: dict[str, Any] = {"train_dataloader": loader(24), "max_duration": "1ep"}
    first, _ = quiet(
        classifier(), loggers=TensorBoardLogger(tmp_path), callbacks=At(batch_checkpoint=save), **options
    )
    with first:
        first.fit(duration="4ba")
    second, _ = quiet(classifier(), loggers=TensorBoardLogger(tmp_path), **options)
    second.load_state_dict(saved)
    with second:
        second.fit()
    assert [one.step for one in events(tmp_path).Scalars("loss/train/total")] == [1, 2, 3, 4, 5, 6]


def on_two_ranks(path: Path) -> None:
    with on_parts([3, 3], "fsdp", loggers=TensorBoardLogger(path))[0] as trainer:
        trainer.fit()


def test_rank_0_writes_for_all(world2: World, tmp_path: Path) -> None:
    world2(on_two_ranks, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    assert [one.step for one in events(tmp_path).Scalars("loss/train/total")] == [1, 2, 3, 4]


def test_cells_stay_cells() -> None:
    assert markdown(["a"], [[1.5], ["x"]]) == "| a |\n| --- |\n| 1.5 |\n| x |"
