"""Every preset is a valid configuration that trains on one process and on two, to the same losses."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from composer_dist.cli.init import PRESETS
from composer_dist.recipe.build import default_rate
from composer_dist.recipe.read import read_configuration
from composer_dist.recipe.schema import Run
from tests.kit.grids import in_the_default_run, slow
from tests.kit.scripts.recipes import EVERY, PROMPT, trained, trained_and_exported
from tests.kit.world import World

ADAPTERS = ["lora", "dora", "qlora"]
SMALL = ["data.batch_size=2", "data.context=32", "data.held_out=4", "trainer.max_duration=3ba"]
SMALL += ["trainer.eval_interval=null"]


@pytest.mark.promise(109)
@pytest.mark.parametrize("name", EVERY)
def test_presets_are_valid_and_every_one_has_a_name(name: str) -> None:
    assert {file.stem for file in PRESETS.glob("*.yaml")} == set(EVERY)
    read_configuration(PRESETS / f"{name}.yaml")
    text = (PRESETS / f"{name}.yaml").read_text()
    fixed = re.search(r"^  lr: ", text, re.M)
    assert bool(fixed) == ("pretrained:" not in text), "a rate for a new model would ruin a pretrained one"


@pytest.mark.promise(125)
@pytest.mark.parametrize(("model", "optimizer", "rate"), [
    ({"config": {}}, {"name": "adamw"}, 1e-3),
    ({"pretrained": "a"}, {"name": "adamw"}, 2e-5),
    ({"pretrained": "a"}, {"name": "adam", "lr": 0.1}, 0.1),
    ({"pretrained": "a", "adapter": {}}, {"name": "adamw"}, 2e-4),
    ({"pretrained": "a"}, {"name": "sgd"}, None),
])  # fmt: skip
def test_learning_rates_are_those_for_the_weights(model: Any, optimizer: Any, rate: float | None) -> None:
    data = {"kind": "text", "source": "english"}
    run = {"out": "x", "model": {"kind": "causal_lm"} | model, "data": data, "trainer": {}}
    found = Run.model_validate(run | {"optimizer": optimizer})
    assert (default_rate(found) | found.optimizer.arguments).get("lr") == rate


@pytest.mark.parametrize(
    "name", in_the_default_run("masked_lm", among=[one for one in EVERY if one not in (*ADAPTERS, "vision")])
)
def test_presets_train_alike_on_one_rank_and_two(
    name: str, world1: World, world2: World, tmp_path: Path
) -> None:
    file = PRESETS / f"{name}.yaml"
    alike = list(SMALL)
    if name in ("masked_lm", "classification"):  # BERT has dropout, which each rank draws for itself
        alike += ["model.config.hidden_dropout_prob=0", "model.config.attention_probs_dropout_prob=0"]
    (alone,) = world1(trained, file, f"out={tmp_path}/1", *alike)
    one, other = world2(trained, file, f"out={tmp_path}/2", *alike)
    assert len(alone["losses"]) == 3
    assert one["losses"] == other["losses"] == pytest.approx(alone["losses"], rel=1e-4)


@pytest.mark.parametrize("short", [["trainer.max_duration=20ba"], slow([])])
def test_digits_reach_95_percent_on_one_rank_and_two(
    short: list[str], world1: World, world2: World, tmp_path: Path
) -> None:
    file = PRESETS / "vision.yaml"
    (alone,) = world1(trained, file, f"out={tmp_path}/1", *short)
    one, other = world2(trained, file, f"out={tmp_path}/2", *short)
    assert len(alone["losses"]) >= 20
    assert one["losses"][:20] == pytest.approx(alone["losses"][:20], rel=1e-4, abs=0)
    assert min(alone["accuracies"][-1], one["accuracies"][-1]) >= (0.5 if short else 0.95)
    assert all(one[key] == other[key] for key in ("losses", "accuracies"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("name", in_the_default_run("qlora", among=ADAPTERS))
def test_adapters_reload_with_their_base_and_merged(name: str, world2: World, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from composer_dist.recipe.other_libraries.nf4 import quantize

    if name == "qlora":
        pytest.importorskip("torchao", reason="NF4 is torchao's; it is an extra")
    file = PRESETS / f"{name}.yaml"
    (losses, before, after), _ = world2(trained_and_exported, file, f"out={tmp_path}", *SMALL)
    assert losses[-1] < losses[0]
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    if name == "qlora":
        quantize(base)

    def answers(model: Any, expected: Tensor) -> None:
        with torch.no_grad():
            logits = model.eval()(input_ids=PROMPT).logits
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)

    answers(base, before)
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter")
    peft = loaded.peft_config["default"]
    assert (peft.base_model_name_or_path, peft.use_dora) == (str(tmp_path / "base"), name == "dora")
    answers(loaded, after)
    assert (after - before).abs().max() > 1e-2
    answers(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), after)
