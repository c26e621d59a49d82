"""In which order an export's files appear in its directory."""

import shutil
from pathlib import Path
from unittest import mock

from composer_dist.checkpoint.export.directory import staged

NAMES = (
    "config.json",
    "model.safetensors.index.json",
    "tokenizer/vocab.json",
    "model-00001-of-00001.safetensors",
)


def test_the_index_and_the_configuration_come_last_and_after_stale_weights_are_gone(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "notes.txt").touch()
    moved, move = [], shutil.move

    def watched(source: Path, target: Path) -> None:
        moved.append((target.name, (tmp_path / "model.safetensors").exists()))
        move(source, target)

    with mock.patch.object(shutil, "move", watched), staged(tmp_path) as directory:
        (directory / "tokenizer").mkdir()
        for name in NAMES:
            (directory / name).touch()
    assert sorted(moved[:2]) == [("model-00001-of-00001.safetensors", True), ("vocab.json", True)]
    assert moved[2:] == [("model.safetensors.index.json", False), ("config.json", False)]
    files = {file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*") if file.is_file()}
    assert files == {*NAMES, "notes.txt"}
