"""TRL's trainers with the mixin: the same training as in one process."""

import functools
import json
import random
import runpy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composer_dist.checkpoint import load_checkpoint
from composer_dist.errors import ParallelismValueError
from tests.kit.compare import same, weights
from tests.kit.grids import crossed
from tests.kit.hf_trainer import Ran, made, result, run, same_training
from tests.kit.huggingface import llama, lora, lora_llama, tokenizer
from tests.kit.quantized import NF4, quantize
from tests.kit.worker import forget_accelerate
from tests.kit.world import World
from tests.kit.world import run as on_world

pytest.importorskip("trl", reason="TRL is an extra")
pytestmark = [
    pytest.mark.promise(120),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),  # TRL's and peft's own
    pytest.mark.filterwarnings("ignore:.*rollout_func.*experimental:UserWarning"),
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

    drawn = [
        {"prompt": words(2, 4), "chosen": " " + words(2, 6), "rejected": " " + words(2, 6)}
        for _ in range(count)
    ]
    return Dataset.from_list(drawn)


def kto() -> tuple[Any, Any]:
    import trl

    if trl.KTOConfig.__base__.__module__.startswith("trl.experimental"):  # where TRL 1.0 had it
        from trl.experimental.kto import KTOConfig, KTOTrainer

        return KTOTrainer, KTOConfig
    return trl.KTOTrainer, trl.KTOConfig


def reward() -> tuple[Any, Any]:
    from trl import RewardConfig, RewardTrainer

    return RewardTrainer, RewardConfig


def judge() -> Any:
    """A model with one score for a sequence."""
    from transformers import LlamaForSequenceClassification

    config = llama().config
    config.num_labels, config.pad_token_id = 1, 0
    torch.manual_seed(0)
    return LlamaForSequenceClassification(config)


def tuned(folder: str, config: Any = None, how: str = "sft", model: Any = llama, **options: Any) -> Ran:
    """A run of one of the trainers."""
    given: dict[str, Any] = {"processing_class": tokenizer()}
    if how != "sft":
        given["train_dataset"] = pairs()
    if how == "kto":
        given["train_dataset"] = given["train_dataset"].map(
            lambda one, at: {"completion": one["chosen"], "label": at % 2 == 0},
            with_indices=True,
            remove_columns=["chosen", "rejected"],
        )
    if how in ("dpo", "kto") and model is llama:
        torch.manual_seed(1)
        given["ref_model"] = llama()
    kinds = {"sft": sft, "dpo": dpo, "kto": kto, "reward": reward}[how]
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


@pytest.mark.slow
def test_the_reward_and_kto_trainers_train_as_in_one_process(
    world2: World, tmp_path: Path, alone: Any
) -> None:
    for how, model in (("reward", judge), ("kto", llama)):
        for found in world2(tuned, str(tmp_path), "fsdp", how, model, optim="sgd", **RANKS):
            same_training(found, alone(how, model, optim="sgd"))


@crossed({"mode": MODES, "how": ["sft", "dpo"]})
def test_trains_as_in_one_process(world2: World, tmp_path: Path, alone: Any, mode: str, how: str) -> None:
    for found in world2(tuned, str(tmp_path), MODES[mode], how, **RANKS):
        same_training(found, alone(how, llama))


@crossed({"how": ["sft", "dpo"], "model": [lora_llama, pytest.param(nf4_lora, marks=NF4)]})
def test_trains_adapters_as_in_one_process(
    world2: World, tmp_path: Path, alone: Any, how: str, model: Any
) -> None:
    for found in world2(tuned, str(tmp_path), "fsdp", how, model, **RANKS):
        same_training(found, alone(how, model))


def judged(folder: str, config: Any = None, how: str = "dpo") -> dict[str, float]:
    """An evaluation of twelve pairs in batches of eight."""
    given: dict[str, Any] = {"processing_class": tokenizer(), "train_dataset": pairs()}
    given["eval_dataset"] = pairs(12)
    torch.manual_seed(1)
    given |= {"ref_model": llama()} if how == "dpo" else {}
    kinds, model = (dpo, llama) if how == "dpo" else (reward, judge)
    trainer = made(folder, config, model, given, kinds, bf16=False, max_length=None)
    found: dict[str, float] = trainer.evaluate()
    return {name: value for name, value in found.items() if not name.endswith(("time", "second"))}


@pytest.mark.parametrize("how", ["dpo", "reward"])
def test_evaluates_pairs_that_the_batches_do_not_divide(
    world1: World, world2: World, tmp_path: Path, how: str
) -> None:
    """Each pair has two rows in its batch. On several ranks TRL's own metrics count pairs that fill it up."""
    folder = str(tmp_path)
    [alone] = world1(judged, folder, None, how, **ONE)
    exact = world1(judged, folder, "fsdp", how, **RANKS)
    exact += world2(judged, folder, TP, how, **RANKS) if how == "dpo" else []
    for found in exact:
        assert found == pytest.approx(alone, rel=1e-4)
    for found in world2(judged, folder, "fsdp", how, **RANKS):
        assert found["eval_loss"] == pytest.approx(alone["eval_loss"], rel=1e-5)


def quantized(folder: str) -> tuple[Ran, Ran, Ran]:
    """QLoRA: a run, one from the middle of it, and what peft loads of its export."""
    from peft import PeftModel

    saved = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    whole = tuned(folder, "fsdp", "sft", nf4_lora, **saved)
    names = load_checkpoint(f"{folder}/checkpoint-2/composer_dist")["model"]
    assert all("lora" in name for name in names), list(names)
    given = {"processing_class": tokenizer()}
    trainer = made(folder, "fsdp", nf4_lora, given, sft, bf16=False, max_length=None, max_steps=4)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    trainer.save_model(f"{folder}/out")
    trainer.accelerator.wait_for_everyone()
    base = nf4_lora().unload()
    loaded = PeftModel.from_pretrained(base, f"{folder}/out", is_trainable=True)
    return whole, result(trainer), Ran([], [], {n: p for n, p in weights(loaded).items() if "lora" in n})


@pytest.mark.slow
@NF4
def test_qlora_resumes_bit_for_bit_and_exports_its_adapter(world2: World, tmp_path: Path) -> None:
    for whole, resumed, loaded in world2(quantized, str(tmp_path), **RANKS):
        assert resumed.losses == whole.losses
        same(resumed.parameters, whole.parameters)
        assert loaded.parameters
        same(loaded.parameters, {name: resumed.parameters[name] for name in loaded.parameters})


def rewarded(folder: str, config: Any = None, **options: Any) -> Ran:
    """GRPOTrainer's steps on completions that depend on the prompt and the row's place in its group."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def roll_out(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = [tokenizer()(prompt)["input_ids"] for prompt in prompts]
        written = [
            [4 + (sum(one) * (row % 4 + 1) + at) % 26 for at in range(3 + row % 4)]
            for row, one in enumerate(ids)
        ]
        return {"prompt_ids": ids, "completion_ids": written, "logprobs": None}

    def reward(completions: list[str], **given: Any) -> list[float]:
        return [float(len(set(completion.split()) & {*"aeiou"})) for completion in completions]

    prompts = [{"prompt": " ".join("abcdefghijklm"[at : at + 3])} for at in range(10)]
    given = {"processing_class": tokenizer(), "train_dataset": Dataset.from_list(prompts)}
    given |= {"reward_funcs": reward, "rollout_func": roll_out}
    groups = {"num_generations": 4, "num_iterations": 2, "bf16": False, "max_completion_length": 8}
    return run(folder, config, kinds=lambda: (GRPOTrainer, GRPOConfig), trainer=given, **groups, **options)


@pytest.mark.slow
def test_grpo_s_steps_are_those_of_one_process(world1: World, world2: World, tmp_path: Path) -> None:
    [expected] = world1(rewarded, str(tmp_path), **ONE)
    assert max(expected.norms) > 0
    for found in world2(rewarded, str(tmp_path), "fsdp", **RANKS):
        same_training(found, expected)


def with_tensor_parallelism(folder: str) -> None:
    with pytest.raises(ParallelismValueError, match="samples its own completions"):
        rewarded(folder, TP)


def test_grpo_with_ranks_that_share_rows_is_refused(world2: World, tmp_path: Path) -> None:
    world2(with_tensor_parallelism, str(tmp_path), **RANKS)


def with_context_parallelism(folder: str) -> None:
    with pytest.raises(ParallelismValueError, match="DPOTrainer compares whole sequences"):
        tuned(folder, {"mesh": {"cp": 2}}, "dpo", pad_to_multiple_of=4, gradient_checkpointing=False)


def test_losses_of_whole_sequences_are_refused_with_context_parallelism(
    world2: World, tmp_path: Path
) -> None:
    world2(with_context_parallelism, str(tmp_path), **RANKS)


def referred(folder: str) -> bool:
    """Whether the reference model is sharded, and stays as it was."""
    torch.manual_seed(1)
    reference = llama()
    before = weights(reference)
    given = {"processing_class": tokenizer(), "train_dataset": pairs(), "ref_model": reference}
    trainer = made(folder, "fsdp", kinds=dpo, trainer=given, bf16=False, max_length=None)
    trainer.train()
    same(weights(trainer.ref_model), before)
    return all(isinstance(one, DTensor) for one in trainer.ref_model.parameters())


def test_a_reference_model_is_sharded_too(world2: World, tmp_path: Path) -> None:
    assert world2(referred, str(tmp_path), **RANKS) == [True, True]


SLOW: list[Any] = [(mode, model) for mode in ("fsdp", "hsdp", "fsdp-tp") for model in (llama, lora_llama)]
SLOW += [pytest.param(mode, nf4_lora, marks=NF4) for mode in ("fsdp", "hsdp")]  # nothing cuts NF4 for tp


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sft", "dpo"])
@pytest.mark.parametrize(("mode", "model"), SLOW)
def test_trains_thirty_steps_on_four_ranks_as_in_one_process(
    world4: World, tmp_path: Path, alone: Any, mode: str, how: str, model: Any
) -> None:
    config = {"fsdp": "fsdp", "hsdp": HSDP, "fsdp-tp": TP}[mode]
    options = {"max_steps": 30, "learning_rate": 1e-3}
    for found in world4(tuned, str(tmp_path), config, how, model, **options, **RANKS):
        same_training(found, alone(how, model, **options))


def test_a_yaml_file_of_trl_gives_the_parallelism(tmp_path: Path) -> None:
    from trl import SFTConfig, TrlParser

    from composer_dist.integrations.transformers import ParallelArguments

    arguments = dataclass(type("Arguments", (ParallelArguments, SFTConfig), {}))
    file = tmp_path / "sft.yaml"
    file.write_text("output_dir: out\nuse_cpu: true\nparallelism:\n  mesh: {tp: 2}\n  tp: {}\n")
    [args] = TrlParser([arguments]).parse_args_and_config(["--config", str(file)])
    assert args.parallelism == TP
    [args] = TrlParser([arguments]).parse_args_and_config(["--config", str(file), "--parallelism", "ddp"])
    assert args.parallelism == "ddp"


def example(folder: str) -> tuple[int, str]:
    """The steps and the adapter of a run of the example that was interrupted after eight."""
    main = runpy.run_path(str(ROOT / "examples" / "finetune_trl.py"))["main"]
    out = Path(folder)
    for steps in (8, 10):
        forget_accelerate()
        main(out, steps)
    state = json.loads((out / "checkpoint-10" / "trainer_state.json").read_text())
    return state["global_step"], (out / "adapter_config.json").read_text()


@pytest.mark.slow
def test_the_example_trains_and_resumes(world2: World, tmp_path: Path) -> None:
    for steps, adapter in world2(example, str(tmp_path), **RANKS):
        assert steps == 10
        assert json.loads(adapter)["r"] == 8
