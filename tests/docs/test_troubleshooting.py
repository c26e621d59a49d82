"""The errors that docs/troubleshooting.md quotes are still those of the code."""

import ast
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torchmetrics.classification import MulticlassAccuracy
from typer.testing import CliRunner

from composer_dist import MeshConfig, ParallelismConfig, Rule, TPConfig, Trainer
from composer_dist.checkpoint import load_pretrained
from composer_dist.cli.commands import app
from composer_dist.cli.init import PRESETS
from composer_dist.config.parallelism import resolve_config
from composer_dist.distributed import plan_parallelism
from composer_dist.distributed.ranks.launcher_variables import check_alone
from composer_dist.errors import ParallelismError
from composer_dist.models import ComposerClassifier
from composer_dist.trainer import EarlyStopping
from tests.kit.huggingface import llama
from tests.kit.training import classifier, loader, quiet

ROOT = Path(__file__).parents[2]
OURS, FROM_TORCH = (ROOT / "docs/troubleshooting.md").read_text().split("\n## From torch\n")
QUOTES: dict[str, str] = dict(
    re.findall(r"^### ([^\n]+)\n\n```text\n(.*?)\n```$", OURS, re.DOTALL | re.MULTILINE)
)
"""What is quoted, by heading; `...` is anything."""


class Net(nn.Module):
    """For errors that name a model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def planned(model: nn.Module, world: int, **config: Any) -> None:
    plan_parallelism(model, ParallelismConfig(**config), world_size=world)


def with_heads() -> None:
    with torch.device("meta"):
        model = llama(hidden_size=48, num_attention_heads=6, num_key_value_heads=6)
    planned(model, 4, mesh=MeshConfig(tp=4), tp=TPConfig())


def trained(**options: Any) -> None:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"max_duration": "1ba", "train_dataloader": loader(), "optimizers": optimizer, **options}
    quiet(model, **given)[0].fit()


def on_meta() -> None:
    with torch.device("meta"):
        model = ComposerClassifier(nn.Linear(8, 4), num_classes=4)
    quiet(model)


def metric_on_meta() -> None:
    with torch.device("meta"):
        metric = MulticlassAccuracy(num_classes=4)
    quiet(classifier(val_metrics={"hits": metric}), eval_dataloader=loader())


def loaded_with_other_names() -> None:
    model = Net()
    values = {name: value for name, value in model.state_dict().items() if name != "layers.0.bias"}
    save_file(values | {"layers.9.weight": torch.zeros(2)}, "w.safetensors")
    load_pretrained(model, "w.safetensors")


def loaded_truncated() -> None:
    model = Net()
    save_file(model.state_dict(), "s.safetensors")
    Path("t.safetensors").write_bytes(Path("s.safetensors").read_bytes()[:-10])
    load_pretrained(model, "t.safetensors")


def run_of(preset: str, *overrides: str) -> None:
    arguments = ["train", str(PRESETS / preset), "--dry-run", *overrides]
    raise ParallelismError(CliRunner().invoke(app, arguments).stderr)


PRODUCED: dict[str, Callable[[], object]] = {
    "WORLD_SIZE is set, other variables are not": lambda: check_alone({"WORLD_SIZE": "2"}),
    "The device is not there": lambda: quiet(device="cuda:99"),
    "Unknown key": lambda: run_of("pretrain.yaml", "optimizer.ler=1e-3"),
    "Not a valid duration": lambda: quiet(max_duration="10steps"),
    "No strategy of this name": lambda: resolve_config("fdsp"),
    "No module matches": lambda: planned(Net(), 2, rules=[Rule("layres", shard=True)]),
    "The mesh does not match the number of ranks": lambda: planned(Net(), 2, mesh=MeshConfig(dp_shard=3)),
    "Heads that tp does not divide": with_heads,
    "TPConfig(plan='auto') cannot place these modules": lambda: planned(
        nn.Sequential(nn.Conv2d(3, 4, 3)), 2, mesh=MeshConfig(tp=2), tp=TPConfig()
    ),
    "target_modules matches nothing": lambda: run_of("lora.yaml", "model.adapter.target_modules=[q_projj]"),
    "On the meta device, without values": on_meta,
    "Metrics without values": metric_on_meta,
    "The Trainer needs a ComposerModel": lambda: Trainer(model=Net()),  # type: ignore[arg-type]
    "The checkpoint does not match the model": loaded_with_other_names,
    "Corrupt or truncated": loaded_truncated,
    "A time in tokens": lambda: trained(max_duration="100tok"),
    "There is no metric": lambda: trained(
        callbacks=EarlyStopping("loss/eval/totl"), eval_dataloader=loader(), eval_interval="1ba"
    ),
    "No training length given": lambda: trained(max_duration=None),
}
"""By heading, what raises the error. The others need more than one process: their words are looked up."""


def pieces(quote: str) -> list[str]:
    """What is quoted between the dots, each on one line."""
    return [" ".join(one.split()) for one in quote.split("...") if one.strip()]


@pytest.mark.parametrize("heading", PRODUCED)
def test_a_quoted_error_is_raised(heading: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ParallelismError) as caught:
        PRODUCED[heading]()
    said = " ".join(str(caught.value).split())
    assert re.search(".*".join(map(re.escape, pieces(QUOTES[heading]))), said), said


@cache
def words() -> list[str]:
    """The constant words of each file of the package; what is filled in separates them."""
    found = []
    for path in (ROOT / "composer_dist").rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        texts = [one.value for one in nodes if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        found.append("\n".join(" ".join(one.split()) for one in texts))
    return found


@pytest.mark.parametrize("heading", sorted(set(QUOTES) - set(PRODUCED)))
def test_a_quoted_error_is_in_the_sources(heading: str) -> None:
    parts = pieces(QUOTES[heading])
    assert any(all(part in text for part in parts) for text in words()), parts


def test_each_entry_has_a_quote() -> None:
    assert len(QUOTES) == OURS.count("\n### ") >= 25
    assert set(PRODUCED) <= set(QUOTES)
    assert len(re.findall(r"^### [^\n]+\n\n> ", FROM_TORCH, re.MULTILINE)) == ("\n" + FROM_TORCH).count(
        "\n### "
    )
