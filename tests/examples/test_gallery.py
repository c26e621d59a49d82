"""Every example runs as its first lines say, at toy size."""

import re
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from composer_dist.cli.init import PRESETS
from tests.kit.world import World

EXAMPLES = Path(__file__).parents[2] / "examples"
GALLERY = (Path(__file__).parents[2] / "docs" / "examples.md").read_text()
RUNS = ["dpo.yaml", "encoder_decoder.yaml", "experts.yaml", "phases.yaml", "tensor_parallel.yaml"]


def of_file(name: str, *arguments: str) -> None:
    """Runs the script."""
    with mock.patch.object(sys, "argv", [name, *arguments]), pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert not ended.value.code


def tune(out: Path, steps: int) -> None:
    of_file("finetune_lora.py", "--out", str(out), "--steps", str(steps), "--context", "32")


def test_the_file_to_copy_trains_resumes_and_exports(world2: World, tmp_path: Path) -> None:
    for steps in (2, 3):
        world2(tune, tmp_path, steps, setup="environment", timeout=120)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    saved = sorted(one.name for one in (tmp_path / "checkpoints").iterdir() if not one.is_symlink())
    assert saved == ["ep0-ba2", "ep0-ba3"]


def towers() -> list[str]:
    preparation = runpy.run_path(str(EXAMPLES / "custom_policy.py"))["main"](steps=2)
    return [unit.modules[0] for unit in preparation.plan.units]


def test_the_custom_policy_chooses_the_towers(world2: World) -> None:
    assert world2(towers, setup="environment") == [["", "left", "right"]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_trains_and_exports(tmp_path: Path, name: str) -> None:
    file = EXAMPLES / name
    (ranks,) = re.findall(r"composer-dist train \S+ -n (\d)", file.read_text())
    out = tmp_path / "out"
    short = [f"out={out}", "trainer.eval_interval=null", "data.held_out=4"]
    command = ["composer-dist", "train", str(file), "-n", ranks, *short]
    if name != "phases.yaml":
        command.append("trainer.max_duration=3ba")
    done = subprocess.run(
        command, cwd=EXAMPLES.parent, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (out / ("adapter" if name == "dpo.yaml" else "model")).is_dir()


def test_the_gallery_names_every_example_and_nothing_else() -> None:
    named = set(re.findall(r"`examples/([^`\s]+)", GALLERY))
    assert {name for name in named if not (EXAMPLES / name).exists()} == set()
    there = {one.relative_to(EXAMPLES).as_posix() for one in EXAMPLES.rglob("*.py")}
    there |= {one.relative_to(EXAMPLES).as_posix() for one in EXAMPLES.rglob("*.yaml")}
    assert {one for one in there if not any(one.startswith(name.rstrip("/")) for name in named)} == set()
    presets = set(re.findall(r"composer-dist init (\w+)", GALLERY))
    assert presets == {one.stem for one in PRESETS.glob("*.yaml")}


def test_scripts_are_short() -> None:
    for file in EXAMPLES.glob("*.py"):
        most = (
            75 if file.name in ("finetune_trl.py", "finetune_lightning.py") else 59
        )  # theirs is much to set
        assert len(file.read_text().splitlines()) <= most, file.name
