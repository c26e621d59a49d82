"""A file of JSON lines that survives whatever happens to the run."""

import copy
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from composer_dist.errors import ParallelismRuntimeError
from composer_dist.trainer import FileLogger, Logger, State, Trainer
from composer_dist.trainer.clock import Timestamp
from tests.kit.compare import fails_alike
from tests.kit.training import At, classifier, fitted_on_parts, loader, quiet, raising
from tests.kit.world import World


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def logged(path: Path) -> list[int]:
    """The batches whose loss is in the file."""
    return [line["batch"] for line in lines(path) if "loss/train/total" in line]


def trainer_of(path: Path, **options: Any) -> tuple[Trainer, FileLogger]:
    file = FileLogger(path)
    trainer, _ = quiet(loggers=file, train_dataloader=loader(), max_duration="3ep", **options)
    return trainer, file


def test_each_moment_is_a_line(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    trainer, _ = trainer_of(path, eval_dataloader=loader(4))
    trainer.fit(duration="2ep")
    first, *rest = lines(path)
    assert first["hyperparameters"]["max_duration"] == "3ep"
    assert [line["batch"] for line in rest] == [1, 2, 3, 3, 4, 5, 6, 6]  # an epoch ends in its own line
    assert list(rest[0])[:5] == ["epoch", "batch", "sample", "token", "seconds"]
    assert (rest[0]["sample"], rest[0]["lr-SGD/group0"]) == (4, 0.1)
    assert rest[3]["epoch"] == 1
    assert "metrics/eval/MulticlassAccuracy" in rest[3]


def started(path: Path, batch: int = 0, **options: Any) -> tuple[FileLogger, State, Logger]:
    """A file in a run that has begun."""
    file = FileLogger(path, **options)
    now = State(model=classifier(), device=torch.device("cpu"), timestamp=Timestamp(batch=batch))
    logger = Logger(now, [file])
    file.fit_start(now, logger)
    return file, now, logger


def test_values_are_read_when_they_are_written_and_all_kinds_are_written(tmp_path: Path) -> None:
    file, now, logger = started(path := tmp_path / "a.jsonl", interval="3ba")
    values = {"a": math.nan, "b": torch.tensor(math.inf), "c": torch.tensor(3), "d": -math.inf, "e": 0.5}
    for _ in range(3):
        assert lines(path) == []
        now.timestamp = now.timestamp.next_batch()
        logger.log_metrics(values)
        logger.log_metrics({"e": torch.tensor(2.5)})
        file.batch_end(now, logger)
    assert [line["batch"] for line in lines(path)] == [1, 2, 3]
    line = lines(path)[0]
    assert {name: line[name] for name in values} == {"a": "nan", "b": "inf", "c": 3, "d": "-inf", "e": 2.5}
    assert math.isnan(float(line["a"]))


def test_tables_have_a_line_of_their_own(tmp_path: Path) -> None:
    file, now, logger = started(tmp_path / "a.jsonl", batch=7)
    logger.log_table("generations", ["prompt", "text"], [["a", "b"], ["c", "d\n"]])
    file.close(now, logger)
    (line,) = lines(tmp_path / "a.jsonl")
    assert (line["batch"], line["table"]) == (7, "generations")
    assert line["rows"] == [{"prompt": "a", "text": "b"}, {"prompt": "c", "text": "d\n"}]


def test_a_resumed_run_continues_without_lines_missing_or_twice(tmp_path: Path) -> None:
    path, saved = tmp_path / "cut.jsonl", dict[str, Any]()

    def save(state: Any) -> None:
        if state.timestamp.batch == 5:
            saved.update(copy.deepcopy(first.state_dict()))
            assert logged(path) == [1, 2, 3, 4, 5]  # what is saved is in the file, whatever the interval

    kill = At(batch_checkpoint=raising(KeyboardInterrupt(), 7))
    first, _ = trainer_of(path, callbacks=[At(batch_checkpoint=save), kill])
    with pytest.raises(KeyboardInterrupt):
        first.fit()
    assert logged(path) == [1, 2, 3, 4, 5, 6, 7]  # closed by Ctrl-C
    path.write_text(path.read_text() + '{"batch": 8, "loss/tr')  # and cut off

    second, _ = trainer_of(path)
    second.load_state_dict(saved)
    second.fit()
    assert logged(path) == [*range(1, 10)]
    assert sum("hyperparameters" in line for line in lines(path)) == 1
    assert [one.name for one in tmp_path.iterdir()] == ["cut.jsonl"]


@pytest.mark.promise(100)
@pytest.mark.parametrize("evaluates", [False, True])
def test_what_is_logged_before_a_resumed_fit_takes_nothing_from_its_order(
    tmp_path: Path, evaluates: bool
) -> None:
    path = tmp_path / "cut.jsonl"
    first, _ = trainer_of(path)
    first.fit(duration="5ba")
    saved = copy.deepcopy(first.state_dict())
    first.fit(duration="2ba")
    first.close()
    if not evaluates:
        path.write_text(path.read_text() + '{"batch": 8, "loss/tr')

    second, _ = trainer_of(path, eval_dataloader=loader(4))
    second.load_state_dict(saved)
    if evaluates:
        second.eval()
    second.logger.log_metrics({"early": 1.0})
    second.fit()
    assert logged(path) == [*range(1, 10)]
    assert [line["batch"] for line in lines(path) if "early" in line] == [5]
    assert [one.name for one in tmp_path.iterdir()] == ["cut.jsonl"]


STRANGE = [
    b'{"batch": "x"}', b'{"batch": null}', b'{"batch": NaN}', b"[3]", b"not JSON", b"\xff\0", b"[" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("line", STRANGE, ids=range(len(STRANGE)))
def test_lines_of_others_are_kept_aside(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    before = b'{"batch": 2}\n' + line + b'\n{"batch": 3}\n{"batch": 4}\n'
    path.write_bytes(before)
    with pytest.warns(
        UserWarning, match=rf"^{path}, line 2, is not .*; metrics.1.jsonl is the file as it was"
    ):
        file, now, logger = started(path, batch=3)
    file.log_hyperparameters({"lr": 1})
    file.close(now, logger)
    assert lines(path) == [{"batch": 2}, {"batch": 3}, {"hyperparameters": {"lr": 1}}]
    assert (tmp_path / "metrics.1.jsonl").read_bytes() == before


def test_a_hole_of_many_gigabytes_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"batch": 2}\n')
    with path.open("r+b") as sparse:
        sparse.truncate(1 << 40)
    with pytest.warns(UserWarning, match=r"line 2, is not .*; metrics.1.jsonl is the file as it was"):
        started(path, batch=3)
    assert lines(path) == [{"batch": 2}]
    assert (tmp_path / "metrics.1.jsonl").stat().st_size == 1 << 40


@pytest.mark.promise(109)
def test_fits_of_one_trainer_share_a_file_and_another_run_keeps_it_beside_its_own(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for _ in range(2):
        trainer_of(path)[0].fit(duration="1ba")
    assert logged(path) == [1]
    trainer, _ = trainer_of(path)
    for _ in range(2):
        trainer.fit(duration="1ba")
    trainer.close()
    trainer.fit(duration="1ba")
    assert logged(path) == [1, 2, 3]
    names = {one.name for one in tmp_path.iterdir()}
    assert names == {"metrics.1.jsonl", "metrics.2.jsonl", "metrics.jsonl"}


@contextmanager
def nearly_full(path: Path, mode: str = "r", **options: Any) -> Iterator[Any]:
    """As `open`; a write takes half of the bytes, and then the disk is full."""
    with open(path, mode, **options) as file:
        if mode == "ab":

            def write(text: bytes) -> None:
                file.write(text[: len(text) // 2])
                raise OSError(28, "No space left on device")

            yield SimpleNamespace(tell=file.tell, write=write)
        else:
            yield file


def test_a_full_disk_is_one_warning_and_its_lines_are_written_later(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    trainer, _ = trainer_of(path)
    trainer.fit(duration="1ba")
    whole = path.read_text()
    with patch.object(Path, "open", nearly_full):
        with pytest.warns(UserWarning, match="FileLogger could not write: OSError.*No space left"):
            trainer.fit(duration="1ba")
        trainer.fit(duration="2ba")  # warns no more
    assert path.read_text() == whole
    with patch.object(Path, "open", side_effect=OSError(24, "Too many open files")):
        trainer.fit(duration="1ba")
    assert path.read_text() == whole
    trainer.close()
    assert logged(path) == [1, 2, 3, 4, 5]


def on_two_ranks(path: Path) -> list[str]:
    trainer, _ = fitted_on_parts([3, 3], "fsdp", loggers=FileLogger(path))
    return [*trainer.state_dict()["callbacks"]]


def test_rank_0_writes_for_all(world2: World, tmp_path: Path) -> None:
    assert world2(on_two_ranks, tmp_path / "a.jsonl") == [["FileLogger/0"]] * 2
    assert logged(tmp_path / "a.jsonl") == [1, 2, 3, 4]
    assert [one.name for one in tmp_path.iterdir()] == ["a.jsonl"]


def cannot_open(path: Path) -> None:
    with fails_alike(ParallelismRuntimeError, "Rank 0: ", "taken"):
        on_two_ranks(path)


def test_a_file_that_cannot_be_opened_is_an_error_on_every_rank(world2: World, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    world2(cannot_open, tmp_path / "taken" / "a.jsonl")
