"""What a run leaves: the user's module as one file."""

import errno
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

from composer_dist import users_code
from composer_dist.distributed.ranks.hangs import guard
from composer_dist.errors import CheckpointRuntimeError, ParallelismError, ParallelismKeyError
from composer_dist.files.checked import LocalSink
from composer_dist.recipe import session
from composer_dist.recipe.problems import ConfigurationError
from composer_dist.recipe.session import _write_module
from composer_dist.recipe.source import Document
from composer_dist.trainer.improvement import NoMetricError

pytestmark = pytest.mark.promise(109)


@pytest.mark.promise(59)
def test_a_models_file_appears_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session: Any = SimpleNamespace(model=nn.Linear(2, 1), run=SimpleNamespace(out=tmp_path))
    save = torch.save
    before: dict[str, torch.Tensor] = {}

    def cut_short(state: object, file: Any) -> None:
        file.write(b"half")
        raise SystemExit("killed while it writes")

    for number in range(2):
        monkeypatch.setattr(torch, "save", cut_short)
        with pytest.raises(SystemExit):
            _write_module(session)
        assert (tmp_path / "model.pt").exists() == bool(number)
        monkeypatch.setattr(torch, "save", save)
        if number:
            torch.testing.assert_close(torch.load(tmp_path / "model.pt"), before)
        nn.init.constant_(session.model.weight, number)
        before = {name: value.clone() for name, value in session.model.state_dict().items()}
        _write_module(session)
        torch.testing.assert_close(torch.load(tmp_path / "model.pt"), before)
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt"]


def test_a_full_disk_is_named_with_the_models_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session: Any = SimpleNamespace(model=nn.Linear(2, 1), run=SimpleNamespace(out=tmp_path))
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(LocalSink, "write", full)
    with pytest.raises(CheckpointRuntimeError) as error:
        _write_module(session)
    assert str(error.value) == f"Cannot write {tmp_path}/model.pt: No space left on device."


@pytest.mark.promise(117)
def test_a_hang_of_the_export_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[tuple[float, str]] = []
    monkeypatch.setattr(guard.HangGuard, "_end", lambda one, idle, limit: ended.append((limit, one.doing())))

    def finish(one: Any) -> None:
        while not ended:
            time.sleep(0.05)

    monkeypatch.setattr(session, "finish", finish)
    monkeypatch.setattr(session, "_steps", lambda one: "")
    run = SimpleNamespace(trainer={"max_duration": "1ba", "hang_timeout": {"save": "1s"}}, out="runs/a")
    session._run(SimpleNamespace(trainer=MagicMock(preparation=None), run=run, summary=MagicMock()))  # type: ignore[arg-type]
    assert ended[0] == (1.0, "the export")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ParallelismKeyError("Rank 1: KeyError: 'text'"), ParallelismKeyError),
        (NoMetricError("there is no metric 'x'"), ConfigurationError),
    ],
)
def test_only_a_metric_that_nothing_logs_is_the_configurations_fault(
    monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception]
) -> None:
    def fails(one: Any) -> None:
        raise error

    for name in ("process_group", "build", "run_folder"):
        monkeypatch.setattr(session, name, MagicMock())
    monkeypatch.setattr(session, "_run", fails)
    monkeypatch.setattr(users_code, "is_users_file", lambda file: False)  # this file stands for ours
    configuration: Any = SimpleNamespace(document=Document({}, "a.yaml"), run=MagicMock())
    with pytest.raises(ParallelismError) as caught:
        session.run(configuration)
    assert caught.type is kind
