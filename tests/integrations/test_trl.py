"""TRL's trainers with the mixin: the same training as in one process."""

import functools
import json
import random
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.kit.hf_trainer import Ran, reset_accelerate, run, same_training
from tests.kit.huggingface import llama, lora, lora_llama, tokenizer
from tests.kit.quantized import NF4, quantize
from tests.kit.world import World
from tests.kit.world import run as on_world

pytest.importorskip("trl", reason="TRL is an extra")
pytestmark = [
    pytest.mark.promise(120),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),  # TRL's and peft's own
]

ROOT = Path(__file__).parents[2]
TP: dict[str, Any] = {"mesh": {"tp": 2}, "tp": {}}
HSDP: dict[str, Any] = {"mesh": {"dp_replicate": 2}}
MODES = {"fsdp": "fsdp", "ddp": "ddp", "tp": TP}
RANKS: dict[str, Any] = {"setup": "environment", "timeout": 180}
ONE: dict[str, Any] = {"setup": "nothing", "timeout": 180}


def sft() -> tuple[Any, Any]:
    from trl import SFTConfig, SFTTrainer

    return SFTTrainer, SFTConfig


def dpo() -> tuple[Any, Any]:
    from trl import DPOConfig, DPOTrainer

    return DPOTrainer, DPOConfig


def pairs(count: int = 48) -> Any:
    """Prompts, each with a better and a worse completion of different lengths."""
    from datasets import Dataset

    draw = random.Random(0)

    def words(least: int, most: int) -> str:
        return " ".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(least, most)))

    found = [
        {"prompt": words(2, 4), "chosen": " " + words(2, 6), "rejected": " " + words(2, 6)}
        for _ in range(count)
    ]
    return Dataset.from_list(found)


def tuned(folder: str, config: Any = None, how: str = "sft", model: Any = llama, **options: Any) -> Ran:
    """A run of SFTTrainer or DPOTrainer."""
    given: dict[str, Any] = {"processing_class": tokenizer()}
    if how == "dpo":
        given["train_dataset"] = pairs()
        if model is llama:
            torch.manual_seed(1)
            given["ref_model"] = llama()
    kinds = {"sft": sft, "dpo": dpo}[how]
    options = {"bf16": False, "max_length": None} | options
    return run(folder, config, model=model, kinds=kinds, trainer=given, **options)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, workers: None) -> Any:
    """The trainer without the mixin, in one process."""
    folder = tmp_path_factory.mktemp("alone")

    @functools.cache
    def train(how: str, model: Any, **options: Any) -> Ran:
        found: Ran = on_world(tuned, 1, str(folder), how=how, model=model, **options, **ONE)[0]
        return found

    return train


def nf4_lora() -> Any:
    """QLoRA: adapters beside frozen NF4 weights."""
    model = llama(hidden_size=256, intermediate_size=256, num_attention_heads=2, num_hidden_layers=1)
    for layer in model.model.layers.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(quantize(layer.weight.detach(), "nf4"), requires_grad=False)
    return lora(model, init_lora_weights=False)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["sft", "dpo"])
def test_trains_as_in_one_process(world2: World, tmp_path: Path, alone: Any, mode: str, how: str) -> None:
    for found in world2(tuned, str(tmp_path), MODES[mode], how, **RANKS):
        same_training(found, alone(how, llama))


@pytest.mark.parametrize("how", ["sft", "dpo"])
@pytest.mark.parametrize("model", [lora_llama, pytest.param(nf4_lora, marks=NF4)])
def test_trains_adapters_as_in_one_process(
    world2: World, tmp_path: Path, alone: Any, how: str, model: Any
) -> None:
    for found in world2(tuned, str(tmp_path), "fsdp", how, model, **RANKS):
        same_training(found, alone(how, model))


def example(folder: str) -> tuple[int, str]:
    """The steps and the adapter of a run of the example that was interrupted after eight."""
    main = runpy.run_path(str(ROOT / "examples" / "finetune_trl.py"))["main"]
    out = Path(folder)
    for steps in (8, 10):
        reset_accelerate()
        main(out, steps)
    state = json.loads((out / "checkpoint-10" / "trainer_state.json").read_text())
    return state["global_step"], (out / "adapter_config.json").read_text()


def test_the_example_trains_and_resumes(world2: World, tmp_path: Path) -> None:
    for steps, adapter in world2(example, str(tmp_path), **RANKS):
        assert steps == 10
        assert json.loads(adapter)["r"] == 8
