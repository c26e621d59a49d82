"""MLflow, in a local database."""

import os
from pathlib import Path
from typing import Any

import pytest

from composer_dist.errors import ParallelismValueError
from composer_dist.trainer import Callback, MLflowLogger, Timestamp, Trainer
from tests.kit.training import At, Table, loader, quiet, raising

# mlflow 3.17 with SQLAlchemy 2.1: its own models use a loader that is deprecated there.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A database, which takes seconds to make."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Artifacts go below the working directory."""
    monkeypatch.chdir(tmp_path)


def trainer_of(uri: str, name: str, *callbacks: Callback, **options: Any) -> Trainer:
    logger = MLflowLogger(name, "name", uri, {"who": "us"})
    options = {"max_duration": "1ep", "train_dataloader": loader()} | options
    return quiet(loggers=logger, callbacks=callbacks, **options)[0]


def only_run(uri: str, name: str) -> tuple[Any, Any]:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name(name)
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    return client, run


def test_a_server_that_does_not_answer_is_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    name, seen = "MLFLOW_HTTP_REQUEST_MAX_RETRIES", []

    def get(*args: Any) -> None:
        seen.append(os.environ[name])
        raise TimeoutError

    monkeypatch.setattr(MlflowClient, "get_experiment_by_name", get)
    for given in (None, "5"):
        monkeypatch.delenv(name, raising=False)
        if given:
            monkeypatch.setenv(name, given)
        with pytest.raises(TimeoutError):
            MLflowLogger(tracking_uri="http://127.0.0.1:9")._open(Timestamp(), None)
        assert os.environ.get(name) == given
    assert seen == ["2", "5"]


def test_an_address_of_no_known_kind_is_named() -> None:
    with pytest.raises(ParallelismValueError, match="MLflowLogger: tracking_uri='foo://x': "):
        MLflowLogger(tracking_uri="foo://x")._open(Timestamp(), None)


def test_metrics_tables_and_parameters_reach_the_run_and_it_is_resumed(uri: str) -> None:
    with trainer_of(uri, "whole", Table("a", "b"), eval_dataloader=loader()) as trainer:
        trainer.fit(duration="2ba")
        saved = trainer.state_dict()
        trainer.fit()
    client, run = only_run(uri, "whole")
    history = client.get_metric_history(run.info.run_id, "loss/train/total")
    assert [one.step for one in history] == [1, 2, 3]
    assert history[-1].value == pytest.approx(float(trainer.state.metric_values["loss/train/total"]))
    assert run.data.metrics["metrics/eval/MulticlassAccuracy"] >= 0
    assert (run.data.params["max_duration"], run.data.tags["who"]) == ("1ep", "us")
    assert (run.info.run_name, run.info.status) == ("name", "FINISHED")
    (artifact,) = client.list_artifacts(run.info.run_id, "generations")
    assert artifact.path == "generations/batch-3.md"

    second = trainer_of(uri, "whole", max_duration="2ep")
    second.load_state_dict(saved)
    with second:
        second.fit()
    client, run = only_run(uri, "whole")
    steps = [one.step for one in client.get_metric_history(run.info.run_id, "loss/train/total")]
    assert steps == [1, 2, 3, 4, 5, 6]  # batch 3 once, as it was
    assert (run.data.params["max_duration"], run.data.tags["max_duration"]) == ("1ep", "2ep")


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt(), "KILLED"), (OSError(), "FAILED")])
def test_a_run_that_ends_early_says_so_and_has_its_values(uri: str, error: Any, status: str) -> None:
    with pytest.raises(type(error)):
        trainer_of(uri, status, At(batch_end=raising(error))).fit()
    client, run = only_run(uri, status)
    assert run.info.status == status
    assert len(client.get_metric_history(run.info.run_id, "loss/train/total")) == 1


def test_a_server_that_fails_is_a_warning_and_training_goes_on(uri: str) -> None:
    trainer = trainer_of(uri, "gone")
    trainer.fit(duration="1ba")
    logger: Any = trainer.logger.destinations[0]
    logger._run_id = "gone"
    with pytest.warns(UserWarning, match="MLflowLogger could not write: MlflowException.*gone"):
        trainer.fit(duration="1ba")
