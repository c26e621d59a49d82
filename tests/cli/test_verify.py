"""`composer-dist verify`."""

import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

from composer_dist.cli.commands import app
from composer_dist.cli.init import PRESETS
from composer_dist.distributed.verification import verify

pytestmark = pytest.mark.promise(113)
SMALL = ["data.batch_size=4"]


def printed(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["verify", *map(str, arguments)], prog_name="composer-dist")
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.slow
def test_a_run_of_two_processes_is_verified(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "composer_dist", "verify", str(PRESETS / "vision.yaml"), "-n", "2"]
    command += [*SMALL, f"out={tmp_path / 'out'}", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["ok"], found["differences"], found["notes"]) == (True, [], [])
    counts = {row["what"]: row["count"] for row in found["checked"]}
    assert counts["gradient"] == counts["optimizer step"] > 0
    assert not (tmp_path / "out").exists()


def test_a_difference_ends_with_1_and_the_table() -> None:
    copied = verify.plain_copy

    def other(model: torch.nn.Module) -> torch.nn.Module:
        plain = copied(model)
        next(plain.parameters()).data.mul_(2)
        return plain

    with mock.patch.object(verify, "plain_copy", other):
        status, shown, told = printed(PRESETS / "vision.yaml", *SMALL)
    assert status == 1, told
    assert "first module whose output differs: module" in shown
    assert told.startswith("composer-dist verify")
    assert "the prepared model is not the one that" in told


def test_a_faulty_configuration_ends_with_2() -> None:
    status, _, told = printed(PRESETS / "vision.yaml", "optimiser=adamw")
    assert (status, "optimiser" in told) == (2, True)
