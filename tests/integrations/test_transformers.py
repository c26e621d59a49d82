"""transformers' Trainer with the mixin: the same training, checkpoints, exports and metrics as without it."""

import functools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from composer_dist.distributed import init_context
from composer_dist.errors import ParallelismValueError
from tests.kit.compare import same, weights
from tests.kit.hf_trainer import Ran, made, result, rows, run, same_training
from tests.kit.huggingface import dropping_gpt2, llama, lora_llama, tokenizer
from tests.kit.world import World
from tests.kit.world import run as on_world

pytestmark = [
    pytest.mark.promise(120),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # peft's own
]

TP: dict[str, Any] = {"mesh": {"tp": 2}, "tp": {}}
CP: dict[str, Any] = {"mesh": {"cp": 2}}
HSDP: dict[str, Any] = {"mesh": {"dp_replicate": 2}}
MODES = {"fsdp": "fsdp", "ddp": "ddp", "tp": TP, "cp": CP}
RANKS: dict[str, Any] = {"setup": "environment", "timeout": 120}
ONE: dict[str, Any] = {"setup": "nothing", "timeout": 120}
ACCUMULATE = {"gradient_accumulation_steps": 2}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, workers: None) -> Any:
    """The Trainer without the mixin, in one process: `alone(**options of made)`."""
    folder = tmp_path_factory.mktemp("alone")

    @functools.cache
    def train(model: Any = llama, **options: Any) -> Ran:
        found: Ran = on_world(run, 1, str(folder), model=model, **options, **ONE)[0]
        return found

    return train


@pytest.mark.parametrize("mode", MODES)
def test_trains_as_in_one_process(world2: World, tmp_path: Path, alone: Any, mode: str) -> None:
    """Losses, norms, clipping, decay and accumulation, where rows have different numbers of labels."""
    for found in world2(run, str(tmp_path), MODES[mode], **ACCUMULATE, **RANKS):
        same_training(found, alone(**ACCUMULATE))


@pytest.mark.parametrize(
    ("mode", "model", "options"),
    [("fsdp", llama, {"activation_checkpointing": True}), ("tp", llama, {}), ("fsdp", lora_llama, {})],
    ids=["recomputed", "tp", "lora"],
)
def test_trains_options_as_in_one_process(
    world2: World, tmp_path: Path, alone: Any, mode: str, model: Any, options: Any
) -> None:
    for found in world2(run, str(tmp_path), MODES[mode], model=model, **options, **RANKS):
        same_training(found, alone(model, **options))


@pytest.mark.slow
@pytest.mark.parametrize("model", [llama, lora_llama])
@pytest.mark.parametrize("config", [HSDP, TP, CP, "fsdp"], ids=["hsdp", "fsdp-tp", "fsdp-cp", "fsdp"])
def test_trains_thirty_steps_on_four_ranks_as_in_one_process(
    world4: World, tmp_path: Path, alone: Any, config: Any, model: Any
) -> None:
    options = {"max_steps": 30, "learning_rate": 1e-3} | ACCUMULATE
    for found in world4(run, str(tmp_path), config, model=model, **options, **RANKS):
        same_training(found, alone(model, **options))


SAVED: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}


def saved_and_resumed(folder: str, config: Any) -> tuple[Ran, Ran, list[str]]:
    """A run that saves, a run from the middle of it, and what the checkpoint has."""
    whole = run(folder, config, model=dropping_gpt2, **SAVED)
    found = sorted(path.name for path in Path(folder, "checkpoint-2").iterdir())
    return whole, run(folder, config, f"{folder}/checkpoint-2", model=dropping_gpt2), found


@pytest.mark.parametrize("mode", ["fsdp", "ddp", "tp"])
def test_resumes_bit_for_bit(world2: World, tmp_path: Path, mode: str) -> None:
    """With dropout, momenta, a schedule and shuffled rows."""
    for whole, resumed, found in world2(saved_and_resumed, str(tmp_path), MODES[mode], **RANKS):
        assert len(resumed.losses) == 4  # the log of the first two is in trainer_state.json
        assert resumed.losses == whole.losses
        assert resumed.norms == whole.norms
        same(resumed.parameters, whole.parameters)
        assert {"composer_dist", "model.safetensors", "config.json", "rng_state_1.pth"} <= {*found}


def test_another_mesh_and_the_plain_trainer_s_checkpoint_resume(
    world1: World, world2: World, tmp_path: Path
) -> None:
    """One process starts, two shards continue, then tensor parallelism; as one process throughout."""
    folder = str(tmp_path)
    [whole] = world1(run, folder, max_steps=6, **SAVED, **ONE)
    for step in (4, 6):
        shutil.rmtree(tmp_path / f"checkpoint-{step}")
    world2(run, folder, "fsdp", f"{folder}/checkpoint-2", max_steps=6, **SAVED, **RANKS)
    shutil.rmtree(tmp_path / "checkpoint-6")
    (tmp_path / "checkpoint-8").mkdir()  # of a run that was killed while it saved
    for found in world2(run, folder, TP, True, max_steps=6, **RANKS):
        same_training(found, whole)


def exported(folder: str, config: Any, model: Any) -> dict[str, Tensor]:
    trainer = made(folder, config, model, trainer={"processing_class": tokenizer()})
    trainer.train()
    trainer.save_model()
    return result(trainer).parameters


def test_exports_what_transformers_and_peft_load(world2: World, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    whole, adapter = tmp_path / "whole", tmp_path / "adapter"
    [parameters, _] = world2(exported, str(whole), "fsdp", llama, **RANKS)
    same(weights(AutoModelForCausalLM.from_pretrained(whole)), parameters)
    assert AutoTokenizer.from_pretrained(whole).pad_token == "<pad>"
    assert (whole / "training_args.bin").exists()

    [parameters, _] = world2(exported, str(adapter), TP, lora_llama, **RANKS)
    assert not (adapter / "model.safetensors").exists()
    torch.manual_seed(0)
    loaded = PeftModel.from_pretrained(llama(), adapter)
    same(weights(loaded), parameters)


def right(prediction: Any) -> dict[str, float]:
    """How many tokens are right, and of how many."""
    logits, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    known = labels != -100
    return {"right": float((logits.argmax(-1) == labels)[known].sum()), "tokens": float(known.sum())}


def evaluated(folder: str, config: Any = None) -> tuple[dict[str, float], Any, Any]:
    """Metrics before training, and predictions of a number of rows that the batches do not divide."""
    from datasets import Dataset

    data = Dataset.from_list(rows(24, seed=2))
    trainer = made(folder, config, trainer={"eval_dataset": data, "compute_metrics": right})
    metrics, predicted = trainer.evaluate(), trainer.predict(data.select(range(19)))
    named = {name: metrics[name] for name in ("eval_loss", "eval_right", "eval_tokens")}
    return named, predicted.predictions, predicted.label_ids


@pytest.mark.parametrize("mode", MODES)
def test_evaluates_and_predicts_each_row_once(
    world1: World, world2: World, tmp_path: Path, mode: str
) -> None:
    [(metrics, logits, labels)] = world1(evaluated, str(tmp_path), **ONE)
    assert logits.shape == (19, 12, 50)
    for found, its_logits, its_labels in world2(evaluated, str(tmp_path), MODES[mode], **RANKS):
        assert found == pytest.approx(metrics, rel=1e-5)
        assert its_logits == pytest.approx(logits, abs=1e-5)
        assert (its_labels == labels).all()


def with_best(folder: str, config: Any = None) -> tuple[Ran, list[str], list[str], list[float]]:
    """A run that keeps the best of its checkpoints; what is left, and what callbacks were told."""
    from datasets import Dataset
    from transformers import EarlyStoppingCallback, TrainerCallback

    told = []

    class Told(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            told.append(f"step {state.global_step}")

        def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            told.append(f"save {state.global_step}")

        def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            told.append(f"evaluate {state.global_step}")

    data = Dataset.from_list(rows(16, seed=2))
    callbacks = [Told(), EarlyStoppingCallback(2)]
    options = {"load_best_model_at_end": True, "save_total_limit": 2, "max_steps": 12}
    trainer = made(
        folder,
        config,
        trainer={"eval_dataset": data, "callbacks": callbacks},
        eval_strategy="steps",
        eval_steps=2,
        **SAVED,
        **options,
    )
    trainer.train()
    evaluations = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    return result(trainer), sorted(one.name for one in Path(folder).iterdir()), told, evaluations


@pytest.mark.parametrize("mode", ["fsdp", "tp"])
def test_keeps_the_best_checkpoint_stops_early_and_calls_back(
    world1: World, world2: World, tmp_path: Path, mode: str
) -> None:
    [(best, folders, told, evaluations)] = world1(with_best, str(tmp_path / "one"), **ONE)
    assert folders == [
        "checkpoint-4",
        "checkpoint-8",
    ]  # the best, and after two that were not better the last
    for found in world2(with_best, str(tmp_path / "many"), MODES[mode], **RANKS):
        same_training(found[0], best)
        assert found[1:3] == (folders, told)
        assert found[3] == pytest.approx(evaluations, rel=1e-5)


def from_disk(folder: str, weights_at: str) -> tuple[Ran, bool]:
    with init_context():
        model = llama()
    on_meta = all(parameter.is_meta for parameter in model.parameters())
    trainer = made(folder, "fsdp", lambda: model, {"weights": weights_at})
    trainer.train()
    return result(trainer), on_meta


def test_fills_a_model_on_meta_from_disk(world2: World, tmp_path: Path, alone: Any) -> None:
    torch.manual_seed(0)
    llama().save_pretrained(tmp_path / "start")
    for found, on_meta in world2(from_disk, str(tmp_path), str(tmp_path / "start"), **RANKS):
        assert on_meta
        same_training(found, alone())


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from rows()


def streamed(folder: str, config: Any = None, **options: Any) -> Ran:
    return run(folder, config, trainer={"train_dataset": Stream()}, **options)


def distributed_by_rank_0(folder: str) -> None:
    with pytest.raises(ParallelismValueError, match="training set, a Stream, .*dispatch_batches"):
        streamed(folder, TP)


def test_rows_that_cannot_be_shared_are_refused(world2: World, tmp_path: Path) -> None:
    world2(distributed_by_rank_0, str(tmp_path), **RANKS)


def test_ranks_of_tensor_parallelism_share_the_rows_of_a_stream(
    world1: World, world2: World, tmp_path: Path
) -> None:
    apart = {"accelerator_config": {"dispatch_batches": False}}
    [expected] = world1(streamed, str(tmp_path), **apart, **ONE)
    for mode in ("tp", "fsdp"):
        for found in world2(streamed, str(tmp_path), MODES[mode], **apart, **RANKS):
            same_training(found, expected)
