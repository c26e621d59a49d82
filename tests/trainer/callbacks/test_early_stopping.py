"""When training has brought nothing for long enough."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from composer_dist.errors import ParallelismKeyError, ParallelismTypeError, ParallelismValueError
from composer_dist.trainer import CheckpointSaver, EarlyStopping, FineTuningPhases, NoImprovement, Phase
from composer_dist.trainer.improvement import Improvement
from tests.kit.training import Scores, batches, fitted, fitted_on_parts, loader, quiet
from tests.kit.world import World

NAN = float("nan")


def stopped_after(values: list[float], name: str = "metrics/eval/score", **options: Any) -> int:
    """Epochs until it stops, of as many as there are values."""
    callbacks = [Scores(*values, name=name), EarlyStopping(name, **options)]
    trainer, _ = fitted(callbacks=callbacks, eval_dataloader=loader(4), max_duration=f"{len(values)}ep")
    return trainer.state.timestamp.epoch


@pytest.mark.parametrize(
    ("values", "arguments", "epochs"),
    [
        ([1, 2, 3, 4], {}, 4),
        ([1, 2, 2, 4], {}, 3),
        ([2, 1, 1, 3, 1, 1, 1, 1], {"patience": 3}, 7),
        ([1, 2, 1, 1, 1, 1], {"patience": "3ep"}, 5),
        ([1, 2, 1, 1, 1, 1], {"patience": "6ba"}, 4),
        ([1, 2, 1, 1, 1, 1], {"patience": "0.5dur"}, 5),
        ([1.0, 1.4, 1.8, 2.2], {"min_delta": 0.5}, 2),
        ([3, 2, 1, 1], {"mode": "min"}, 4),
        ([3, 2, 1, 1, 1], {"mode": "min", "patience": 2}, 5),
        ([NAN, 1, NAN, 2], {"patience": 2}, 4),
        ([NAN, NAN, 1], {"patience": 2}, 2),
        ([3, 2, 1, 2, 1], {"name": "loss/eval/extra"}, 4),  # a loss is good when it is small
    ],
)
def test_it_stops_when_patience_is_over(values: list[float], arguments: Any, epochs: int) -> None:
    assert stopped_after(values, **arguments) == epochs


def test_training_metrics_are_looked_at_each_epoch() -> None:
    stop = EarlyStopping("loss/train/total", min_delta=100.0)
    trainer, log = fitted(callbacks=stop, max_duration="9ep")
    assert trainer.state.timestamp.epoch == 2
    assert stop.best == log.values("loss/train/total")[2]


def test_only_evaluations_within_fit_count() -> None:
    stop = EarlyStopping("loss/eval/total", patience=1, min_delta=100.0)
    trainer, _ = quiet(callbacks=stop)
    for _ in range(3):
        trainer.eval(loader())
    assert stop.best is None


def test_it_remembers() -> None:
    first = EarlyStopping("metrics/eval/score", patience=3)
    fitted(callbacks=[Scores(5, 1, 1), first], eval_dataloader=loader(4), max_duration="2ep")
    second = EarlyStopping("metrics/eval/score", patience=3)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    assert (second.best, first.state_dict()["waited"]) == (5, 1)


def test_a_run_that_was_stopped_stays_so_when_it_resumes(tmp_path: Path) -> None:
    def epochs(patience: int, *scores: float) -> int:
        stopping = EarlyStopping("metrics/eval/score", patience=patience)
        callbacks = [Scores(*scores), stopping, CheckpointSaver(tmp_path)]
        options = {"callbacks": callbacks, "eval_dataloader": loader(4), "resume": True}
        trainer, _ = fitted(max_duration="9ep", **options)
        trainer.close()
        return trainer.state.timestamp.epoch

    assert epochs(2, 5, 1, 1) == 3
    assert [epochs(2), epochs(2)] == [3, 3]
    assert epochs(4, 1, 1) == 5


def test_a_state_of_an_earlier_version_is_loaded() -> None:
    stopping = EarlyStopping("metrics/eval/score", patience=3)
    stopping.load_state_dict(Improvement(best=5.0, waited=3).state_dict())
    assert stopping.best == 5.0


def test_the_state_of_another_metric_is_not_loaded(caplog: pytest.LogCaptureFixture) -> None:
    first, second = (EarlyStopping(f"metrics/eval/{name}") for name in ("one", "two"))
    second.load_state_dict(first.state_dict() | {"best": 5.0})
    assert second.best is None
    assert "metrics/eval/two starts over: the saved one is of metrics/eval/one" in caplog.text


def test_a_run_is_saved_before_the_error_that_nothing_was_logged(tmp_path: Path) -> None:
    callbacks = [EarlyStopping("metrics/eval/size"), CheckpointSaver(tmp_path, "100ba")]
    with pytest.raises(ParallelismKeyError, match="no metric 'metrics/eval/size'"):
        fitted(callbacks=callbacks, max_duration="3ba")
    assert (tmp_path / "ep1-ba3").is_dir()


def test_what_is_not_logged_is_an_error() -> None:
    for name in ("metrics/eval/accuracy", "size"):
        with pytest.raises(ParallelismKeyError, match=f"no metric '{name}'.*loss/train/total"):
            fitted(callbacks=EarlyStopping(name), eval_dataloader=loader(4))


@pytest.mark.promise(127)
def test_a_metric_of_data_on_which_nothing_evaluates_is_refused_before_training(tmp_path: Path) -> None:
    name = "loss/evl/total"
    until = NoImprovement(metric=name)
    for callback in (
        EarlyStopping(name),
        CheckpointSaver(tmp_path, monitor=name),
        FineTuningPhases([Phase("module.2", until=until), Phase("rest")]),
    ):
        counter = Scores(1, 2)
        text = f"no metric '{name}', because the fit evaluates on eval only. Use 'loss/eval/total'"
        with pytest.raises(ParallelismKeyError, match=text):
            fitted(callbacks=[counter, callback], eval_dataloader=loader(4))
        assert counter.values == [1, 2]  # there was no evaluation


def test_arguments_that_cannot_be() -> None:
    with pytest.raises(ParallelismTypeError, match="patience"):
        EarlyStopping("loss/eval/total", patience=1.5)  # type: ignore[arg-type]
    for wrong in ({"patience": 0}, {"patience": "0ep"}, {"min_delta": -1.0}):
        with pytest.raises(ParallelismValueError, match="patience must be positive"):
            EarlyStopping("loss/eval/total", **wrong)  # type: ignore[arg-type]
    with pytest.raises(ParallelismValueError, match="mode must be"):
        EarlyStopping("loss/eval/total", mode="low")  # type: ignore[arg-type]


def on_ranks_that_differ() -> int:
    rank = dist.get_rank()
    callbacks = [Scores(*[[1, 2, 3, 4, 5], [1, 2, 1, 1, 1]][rank]), EarlyStopping("metrics/eval/score")]
    options = {"callbacks": callbacks, "eval_dataloader": batches([3, 3], rank), "max_duration": "5ep"}
    trainer, _ = fitted_on_parts([3, 3], "fsdp", **options)
    return trainer.state.timestamp.epoch


def test_all_ranks_stop_when_one_does(world2: World) -> None:
    assert world2(on_ranks_that_differ) == [3, 3]
