"""`composer-dist init`: files that run as they are."""

import errno
from pathlib import Path

import pytest
from typer.testing import CliRunner

from composer_dist.cli.commands import app
from composer_dist.cli.init import Preset
from composer_dist.recipe.read import read_configuration


def call(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["init", *map(str, arguments)])
    return result.exit_code, " ".join(result.output.split())


def test_without_arguments_it_is_pretrain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert call() == (0, "Wrote pretrain.yaml Next: composer-dist train pretrain.yaml")
    assert read_configuration(Path("pretrain.yaml")).run.out == Path("runs/pretrain")
    status, told = call()
    assert status == 2
    assert "pretrain.yaml already exists; pass --force" in told
    assert call("--force")[0] == 0


def test_another_name_is_used_throughout(tmp_path: Path) -> None:
    assert call("vision", tmp_path / "new" / "flowers.yaml")[0] == 0
    assert {file.name for file in (tmp_path / "new").iterdir()} == {"flowers.yaml", "flowers.py"}
    text = (tmp_path / "new" / "flowers.yaml").read_text()
    assert "flowers.py:Net" in text
    assert "vision." not in text
    assert read_configuration(tmp_path / "new" / "flowers.yaml").run.out == Path("runs/flowers")


def test_an_unknown_preset_is_answered_with_the_nearest_one() -> None:
    status, told = call("visoin")
    assert (status, "Value error" in told) == (2, False)
    words = " ".join(told.replace("│", "").split())
    assert "there is no preset 'visoin'. Did you mean 'vision'? Presets: pretrain, finetune," in words


def test_what_it_cannot_write_it_says(tmp_path: Path) -> None:
    assert "should end in .yaml" in call("lora", tmp_path / "lora.txt")[1]


def test_every_preset_is_in_the_help() -> None:
    told = call("--help")[1]
    assert all(preset in told for preset in Preset)


def test_a_disk_that_is_full_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(self: Path, text: str, encoding: str) -> None:
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_text", fill)
    assert call("pretrain", tmp_path / "mine.yaml")[0] != 0
    assert list(tmp_path.iterdir()) == []
