"""The examples of other trainers: as a user runs them, and runs them again for longer."""

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from tests.kit.world import World

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # Lightning's own
    pytest.mark.filterwarnings("ignore:Checkpoint directory|The dirpath:UserWarning"),
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
]
EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, out: Path, epochs: int) -> str:
    """Train so many epochs in all, and return the configuration of the export."""
    command = [name, "--out", str(out), "--epochs", str(epochs)]
    with mock.patch.object(sys, "argv", command), pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert ended.value.code == 0
    return (out / "model" / "config.json").read_text()


def twice(name: str, out: Path, found: str) -> tuple[str, list[str]]:
    run(name, out, 1)
    return run(name, out, 2), sorted(path.name for path in out.glob(found))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "needs", "found", "expected"),
    [
        pytest.param(
            "finetune_lightning.py",
            "lightning",
            "checkpoints/*",
            ["epoch=1-step=16.ckpt", "last.ckpt"],
            marks=pytest.mark.promise(121),
        ),
        pytest.param(
            "finetune_accelerate.py",
            "accelerate",
            "epoch-*",
            ["epoch-1", "epoch-2"],
            marks=pytest.mark.promise(122),
        ),
    ],
)
def test_it_trains_resumes_and_exports(
    world2: World, tmp_path: Path, name: str, needs: str, found: str, expected: list[str]
) -> None:
    pytest.importorskip(needs, reason=f"the example trains with {needs}")
    call: Callable[..., list[tuple[str, list[str]]]] = world2
    for config, files in call(twice, name, tmp_path, found, setup="environment", timeout=120):
        assert json.loads(config)["model_type"] == "llama"
        assert files == expected
