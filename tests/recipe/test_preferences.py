"""DPO from a YAML file."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from composer_dist.recipe.dry_run import describe
from composer_dist.recipe.problems import ConfigurationError
from composer_dist.recipe.read import read_configuration
from tests.kit.preferences import PREFERENCES
from tests.kit.scripts.recipes import logs_of
from tests.kit.world import World

pytestmark = pytest.mark.promise(125)
pytest.importorskip("datasets", reason="an extra")
RUN = """
model:
  kind: causal_lm
  config:
    {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2}
  tokenizer: bytes
  adapter: {method: lora, r: 4, target_modules: all-linear}
  dpo: {beta: 0.2}
data: {kind: preferences, context: 64, batch_size: 4}
trainer: {max_duration: 3ba, eval_interval: 3ba}
checkpoints: null
"""


def test_preferences_train_an_adapter_on_one_rank_and_two(
    world1: World, world2: World, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(map(json.dumps, PREFERENCES)))
    file = tmp_path / "dpo.yaml"
    file.write_text(RUN)
    options = [f"data.source={rows}", f"data.evaluate={rows}"]
    (alone,) = world1(logs_of, file, f"out={tmp_path}/1", *options)
    one, _ = world2(logs_of, file, f"out={tmp_path}/2", *options)
    described = describe(read_configuration(file, [f"out={tmp_path}/3", *options]), 2)
    assert "backward of" in described, "the memory of a step is planned"
    assert alone["loss/train/total"][0] == pytest.approx(0.6931472)
    assert alone["loss/train/total"][2] < alone["loss/train/total"][0]
    assert one["loss/train/total"] == pytest.approx(alone["loss/train/total"], rel=1e-4)
    assert one["metrics/eval/PreferenceAccuracy"] == alone["metrics/eval/PreferenceAccuracy"] == [1.0]


@pytest.mark.parametrize(("change", "message"), [
    ({"adapter": None}, r"preferences needs a model\.adapter"),
    ({"metrics": {"perplexity": {}}}, "the metric is the PreferenceAccuracy"),
    ({"data": {"kind": "chat", "source": "a"}}, r"model\.dpo has no effect"),
])  # fmt: skip
def test_what_preferences_cannot_do_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    values = yaml.safe_load(RUN)
    values["data"] = change.pop("data", values["data"] | {"source": "a"})
    values["model"] |= change
    file = tmp_path / "dpo.yaml"
    file.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigurationError, match=message):
        read_configuration(file, [f"out={tmp_path}"])
