"""The folder of a run: one run at a time, and a record of how it was started."""

import json
import os
from pathlib import Path

import pytest
import torch
import yaml

from composer_dist.errors import CheckpointValueError, ParallelismValueError
from composer_dist.recipe.dry_run import describe
from composer_dist.recipe.output.folder import run_folder
from composer_dist.recipe.read import Configuration, read_configuration
from tests.kit.scripts.locking import holding

pytestmark = pytest.mark.promise(109)

ENGLISH = Path(__file__).parents[2] / "examples" / "demo" / "english.yaml"
RUN = """\
model: {kind: module, name: torch.nn.Linear, arguments: {in_features: 3, out_features: 2}, num_classes: 2}
data: {kind: function, name: "mine.py:data", batch_size: 4}
optimizer: sgd
trainer: {max_duration: 1ba}
"""


def read(folder: Path, *overrides: str) -> Configuration:
    (folder / "run.yaml").write_text(RUN)
    (folder / "mine.py").write_text("def data(): return [0] * 8\n")
    return read_configuration(folder / "run.yaml", [f"out={folder / 'out'}", *overrides])


def test_the_folder_has_the_configuration_and_the_environment(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with run_folder(read(tmp_path, "seed=3")):
        pass
    resolved = yaml.safe_load((out / "configuration.yaml").read_text())
    assert (resolved["seed"], resolved["optimizer"], resolved["parallelism"]) == (3, {"name": "sgd"}, "fsdp")
    again = read_configuration(out / "configuration.yaml", [f"data.name={tmp_path}/mine.py:data"])
    assert again.run == read(tmp_path, "seed=3", f"data.name={tmp_path}/mine.py:data").run
    started = json.loads((out / "environment.json").read_text())
    assert started["versions"]["torch"] == torch.__version__
    assert (started["ranks"], started["directory"]) == (1, os.getcwd())
    assert {"command", "git", "host", "time"} < started.keys()
    with run_folder(read(tmp_path, "seed=4")):
        pass
    seeds = [yaml.safe_load((out / f"configuration{n}.yaml").read_text())["seed"] for n in ("", ".1")]
    assert seeds == [4, 3]


def test_the_configuration_of_a_run_with_a_hugging_face_model_starts_it_again(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(ENGLISH.read_text())
    first = read_configuration(tmp_path / "run.yaml", [f"out={tmp_path / 'out'}"])
    with run_folder(first):
        pass
    assert read_configuration(tmp_path / "out" / "configuration.yaml").run == first.run


def test_two_runs_at_a_time_cannot_have_one_folder(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with holding(tmp_path / "out") as other:
        text = f"Another run writes to out={tmp_path}/out .process {other.pid} on "
        with pytest.raises(ParallelismValueError, match=text), run_folder(read(tmp_path)):
            raise AssertionError
    with run_folder(read(tmp_path)):  # free again
        assert (tmp_path / "out" / ".lock").exists()
    assert not (tmp_path / "out" / ".lock").exists()


@pytest.mark.promise(107)
@pytest.mark.parametrize("name", [".lock", "configuration.yaml", "metrics.jsonl"])
def test_a_link_out_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "mine").write_text("kept")
    (tmp_path / "out" / name).symlink_to(tmp_path / "mine")
    with pytest.raises(CheckpointValueError, match=f"{name} is a link that leads out"):
        run_folder(read(tmp_path)).__enter__()
    assert (tmp_path / "mine").read_text() == "kept"


@pytest.mark.promise(107)
@pytest.mark.parametrize("name", ["checkpoints", "model", "base"])
def test_a_folder_behind_a_link_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).symlink_to(tmp_path)
    text = f"{name} is a link that leads out of out, to {tmp_path}"
    with pytest.raises(ParallelismValueError, match=text):
        describe(read(tmp_path), 1)
    with pytest.raises(ParallelismValueError, match=text), run_folder(read(tmp_path)):
        raise AssertionError


@pytest.mark.parametrize("out", ["file", "file/below", "/proc/self", "/proc/nothing"])
def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, out: str) -> None:
    (tmp_path / "file").touch()
    configuration = read(tmp_path, f"out={tmp_path / out}")
    with pytest.raises(ParallelismValueError, match="cannot be written"), run_folder(configuration):
        raise AssertionError
    if "file" in out:
        with pytest.raises(ParallelismValueError, match="file is not a folder to write to"):
            describe(configuration, 1)
