"""The path of a new user, as docs/quickstart.md tells it: every command of it is run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from composer_dist.cli.commands import app
from composer_dist.cli.init import PRESETS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "quickstart.md").read_text()


BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
"""Language and text of every block of code."""
SHELLS = {"bash": ["bash", "-euo", "pipefail", "-c"], "python": ["python", "-c"]}


def environment(folder: Path) -> dict[str, str]:
    """`composer-dist` and `python` of this interpreter, first on the path."""
    binaries = folder / "bin"
    binaries.mkdir()
    for name, command in (("composer-dist", "-m composer_dist"), ("python", "")):
        script = binaries / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {command} "$@"\n')
        script.chmod(0o755)
    path = f"{binaries}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


@pytest.mark.slow
def test_every_command_of_the_quickstart_works_in_an_empty_directory(tmp_path: Path) -> None:
    environ = environment(tmp_path)
    steps = [block for block in BLOCKS if block[0] in SHELLS]
    assert len(steps) >= 8
    for language, text in steps:
        command = [*SHELLS[language], text]
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
    assert (tmp_path / "runs/second/model/model.safetensors").is_file()
    assert (tmp_path / "runs/lora/adapter/adapter_model.safetensors").is_file()


def test_what_the_quickstart_says_of_a_misspelled_key_is_what_is_printed(tmp_path: Path) -> None:
    (example,) = [
        text for language, text in BLOCKS if language == "console" and "composer-dist train" in text
    ]
    command, printed = example.removeprefix("$ composer-dist ").split("\n", 1)
    train, _, *overrides = command.split()
    result = CliRunner().invoke(app, [train, str(PRESETS / "pretrain.yaml"), *overrides])
    assert (result.exit_code, result.stderr) == (2, printed)
