"""Weights & Biases, in its offline mode: what is in the run's own file."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from composer_dist.trainer import Callback, Trainer, WandBLogger
from tests.kit.training import At, Table, fitted, loader, raising


def records(directory: Path) -> Iterator[Any]:
    """The records of the one run below `directory`."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # its service may still have a part of the file
    (path,) = directory.glob("wandb/offline-run-*/run-*.wandb")
    whole = b""
    for kind, data in chunks(path.read_bytes()):
        whole += data
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(whole)
            whole = b""


def chunks(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The pieces of a file in LevelDB's log format, behind wandb's own seven bytes."""
    block, at = 32768, 7
    while at < len(data):
        if block - at % block < 7:  # no room for a header: filled up
            at += block - at % block
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        yield kind, data[at + 7 : at + 7 + size]
        at += 7 + size


def history(directory: Path) -> list[dict[str, Any]]:
    rows = [record.history.item for record in records(directory) if record.HasField("history")]
    return [{"/".join(one.nested_key) or one.key: json.loads(one.value_json) for one in row} for row in rows]


def trained(directory: Path, *callbacks: Callback) -> Trainer:
    logger = WandBLogger("project", "name", mode="offline", dir=str(directory))
    trainer, _ = fitted(loggers=logger, callbacks=callbacks, eval_dataloader=loader())
    assert list(trainer.state_dict()["callbacks"]["WandBLogger/0"]) == ["id"]
    trainer.close()
    return trainer


def test_metrics_tables_and_hyperparameters_reach_the_run(tmp_path: Path) -> None:
    trainer = trained(tmp_path, Table("a", "b"))
    rows = history(tmp_path)
    assert [row["_step"] for row in rows] == [1, 2, 3]
    assert all("loss/train/total" in row and "lr-SGD/group0" in row for row in rows)
    last = float(trainer.state.metric_values["loss/train/total"])
    assert rows[-1]["loss/train/total"] == pytest.approx(last)
    assert "metrics/eval/MulticlassAccuracy" in rows[-1]
    assert rows[-1]["generations/_type"] == "table-file"
    configs = [record.run.config.update for record in records(tmp_path) if record.HasField("run")]
    configs += [record.config.update for record in records(tmp_path) if record.HasField("config")]
    given = {one.key: json.loads(one.value_json) for update in configs for one in update}
    assert given["max_duration"] == "1ep"
    assert [r.exit.exit_code for r in records(tmp_path) if r.HasField("exit")] == [0]


def test_an_interrupted_run_is_ended_as_such_with_its_values(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path, At(batch_end=raising(KeyboardInterrupt())))
    assert [row["_step"] for row in history(tmp_path)] == [1]
    assert [r.exit.exit_code for r in records(tmp_path) if r.HasField("exit")] == [1]


def test_a_resumed_run_continues_in_the_same_one(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []

    run = Mock(id="abc", log=lambda values, step: given.append({"step": step}))

    def start(**options: Any) -> Mock:
        given.append(options)
        return run

    monkeypatch.setattr("wandb.init", start)
    logger = WandBLogger("project", entity="us")
    logger.load_state_dict({"id": "abc"})
    fitted(loggers=logger, max_duration="1ba")
    assert given == [
        {"project": "project", "name": None, "mode": None, "entity": "us", "id": "abc", "resume": "allow"},
        {"step": 1},
    ]
