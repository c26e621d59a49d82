"""`composer-dist convert-config`: what it writes, prints and refuses."""

import errno
import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml
from typer.testing import CliRunner

from composer_dist.cli.commands import app

pytestmark = pytest.mark.promise(140)


def call(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["convert-config", *map(str, arguments)])
    assert "Traceback" not in result.output
    return result.exit_code, result.stdout, " ".join(result.stderr.replace("│", " ").split())


def test_it_writes_the_result_and_lists_what_is_not_in_it(tmp_path: Path) -> None:
    source, target = tmp_path / "fsdp.json", tmp_path / "ours.yaml"
    source.write_text(json.dumps({"version": 2, "min_num_params": 7, "cpu_offload": True}, indent=1))
    status, printed, told = call(source, target)
    assert (status, printed) == (0, "")
    assert f"{source}, not converted: line 3, min_num_params: parallelism: {{rules:" in told
    assert f"Written to {target}. It is a part of a run" in told
    assert yaml.safe_load(target.read_text()) == {"parallelism": {"fsdp2": {"cpu_offload": True}}}
    assert f"# Converted from {source} (transformers)" in target.read_text()
    status, _, told = call(source, target)
    assert status == 2
    assert "already exists; pass --overwrite" in told


def test_a_disk_that_is_full_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = tmp_path / "fsdp.json", tmp_path / "ours.yaml"
    source.write_text(json.dumps({"version": 2, "cpu_offload": True}))
    target.write_text("old")

    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        status, _, told = call(source, target, "--overwrite")
    assert (status, target.read_text()) == (1, "old")
    assert f"{target}: No space left on device" in told
    assert sorted(tmp_path.iterdir()) == [source, target]


def test_it_prints_one_section_for_other_trainers(tmp_path: Path) -> None:
    source = tmp_path / "fsdp.json"
    source.write_text(json.dumps({"activation_checkpointing": True, "cpu_offload": False}))
    status, _, told = call(source)
    assert status == 2
    assert "Pass --from with one of composer, finetuning-scheduler" in told
    status, printed, _ = call(source, "--from", "transformers", "--only", "parallelism")
    assert status == 0
    assert yaml.safe_load(printed) == {"fsdp2": {}, "activation_checkpointing": "composable"}
    status, _, told = call(source, "--from", "transformers", "--only", "phases")
    assert status == 2
    assert "the conversion has parallelism, but not phases" in told


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    status, _, told = call(tmp_path / "gone.yaml")
    assert status == 2
    assert "gone.yaml: No such file or directory. Give a YAML or JSON file" in told
