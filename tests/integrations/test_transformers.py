"""transformers' Trainer with the mixin: the same training, checkpoints, exports and metrics as without it."""

import functools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from composer_dist.checkpoint import load_checkpoint
from composer_dist.distributed import init_context
from composer_dist.errors import ParallelismValueError
from tests.kit.compare import same, weights
from tests.kit.grids import slow
from tests.kit.hf_trainer import Ran, made, result, rows, run, same_training
from tests.kit.huggingface import built, dropping_gpt2, llama, lora_llama, tokenizer
from tests.kit.measure import losses_counted, with_reductions
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


def test_gradients_may_be_reduced_once_a_step(world2: World, tmp_path: Path, alone: Any) -> None:
    options = {**ACCUMULATE, **RANKS}
    (each, _), (once, found) = (
        world2(with_reductions, run, str(tmp_path), "fsdp", trainer={"accumulate": how}, **options)[0]
        for how in ("sharded", "unsharded")
    )
    assert each == 2 * once > 0
    same_training(found, alone(**ACCUMULATE))


@pytest.mark.parametrize(
    ("mode", "model", "options"),
    [
        ("fsdp", llama, {"activation_checkpointing": True}),
        slow("fsdp", llama, {"label_smoothing_factor": 0.1}),
        slow("tp", llama, {"max_grad_norm": 0.0}),
        ("fsdp", lora_llama, {}),
    ],
    ids=["recomputed", "smoothed", "unclipped", "lora"],
)
def test_trains_options_as_in_one_process(
    world2: World, tmp_path: Path, alone: Any, mode: str, model: Any, options: Any
) -> None:
    for found in world2(run, str(tmp_path), MODES[mode], model=model, **options, **RANKS):
        same_training(found, alone(model, **options))


def classifier() -> Any:
    """A model that takes the Trainer's count of all labels, and returns the mean of its rows."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return built("BertForSequenceClassification", vocab_size=50, num_labels=3, **sizes, **still)


def classified(folder: str, config: Any = None) -> tuple[float, Ran]:
    """The loss of seven rows before training, and the training."""
    from datasets import Dataset

    data = Dataset.from_list([{**row, "labels": n % 3} for n, row in enumerate(rows())])
    sets = {"train_dataset": data, "eval_dataset": data.select(range(7))}
    trainer = made(folder, config, classifier, sets, **ACCUMULATE)
    before: float = trainer.evaluate()["eval_loss"]
    trainer.train()
    return before, result(trainer)


@pytest.mark.parametrize("mode", ["fsdp", "ddp"])
def test_the_loss_of_a_classifier_is_not_multiplied_by_the_ranks(
    world1: World, world2: World, tmp_path: Path, mode: str
) -> None:
    [(before, alone)] = world1(classified, str(tmp_path), **ONE)
    for its_before, its_training in world2(classified, str(tmp_path), MODES[mode], **RANKS):
        assert its_before == pytest.approx(before, rel=1e-5)
        same_training(its_training, alone)


def counts_of(folder: str, how: dict[str, Any]) -> dict[str, int]:
    """How often losses were computed in chunks, and logits whole: in four steps and an evaluation of one."""
    given = dict(how)
    chunked, metrics = given.pop("chunked_loss", None), given.pop("metrics", False)
    with losses_counted() as counts:
        trainer = made(folder, "fsdp", trainer={"chunked_loss": chunked, "eval_dataset": rows(8)}, **given)
        if metrics:
            trainer.compute_metrics = lambda one: {"width": one.predictions.shape[-1]}
        trainer.train()
        found = trainer.evaluate()
    assert found.get("eval_width") == (50 if metrics else None)
    return counts


@pytest.mark.promise(123)
def test_trains_and_evaluates_without_logits_where_nobody_reads_them(world2: World, tmp_path: Path) -> None:
    for how, chunks in (
        ({}, 4 + 1),
        ({"chunked_loss": 5, "metrics": True}, 4),
        ({"chunked_loss": False}, 0),
        ({"label_smoothing_factor": 0.1}, 0),
    ):
        expected = {"chunks": chunks, "values": 0}
        assert world2(counts_of, str(tmp_path), how, **RANKS) == [expected] * 2, how


def reduced(folder: str, config: Any) -> list[bool]:
    """Whether both ranks have the same gradients: after each of two microbatches."""
    from transformers import TrainerCallback

    found = []

    def look(trainer: Any) -> None:
        mine = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
        both = trainer.accelerator.gather(mine).view(2, -1)
        found.append(torch.equal(*both))

    class Look(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            look(trainer)

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            look(trainer)

    trainer = made(folder, config, trainer={"callbacks": [Look()]}, max_steps=2, **ACCUMULATE)
    trainer.train()
    return found


def test_only_the_last_microbatch_reduces(world2: World, tmp_path: Path) -> None:
    assert world2(reduced, str(tmp_path), "ddp", **RANKS) == [[False, True] * 2] * 2


@pytest.mark.slow
@pytest.mark.parametrize("model", [llama, lora_llama])
@pytest.mark.parametrize("config", [HSDP, TP, CP, "fsdp"], ids=["hsdp", "fsdp-tp", "fsdp-cp", "fsdp"])
def test_trains_thirty_steps_on_four_ranks_as_in_one_process(
    world4: World, tmp_path: Path, alone: Any, config: Any, model: Any
) -> None:
    options = {"max_steps": 30, "learning_rate": 1e-3} | ACCUMULATE
    for found in world4(run, str(tmp_path), config, model=model, **options, **RANKS):
        same_training(found, alone(model, **options))


def counted(folder: str, config: Any = None) -> tuple[Ran, int, float]:
    """A run over rows that the batches do not divide, its tokens and its operations."""
    from datasets import Dataset

    data = {"train_dataset": Dataset.from_list(rows(21))}
    trainer = made(folder, config, trainer=data, max_steps=5, include_num_input_tokens_seen="all")
    trainer.train()
    return result(trainer), trainer.state.num_input_tokens_seen, trainer.state.total_flos


@pytest.mark.parametrize("mode", ["tp", "cp"])
def test_rows_that_ranks_share_count_once(world1: World, world2: World, tmp_path: Path, mode: str) -> None:
    [(expected, tokens, operations)] = world1(counted, str(tmp_path), **ONE)
    assert tokens == (8 + 8 + 5 + 8 + 8) * 12
    for found in world2(counted, str(tmp_path), MODES[mode], **RANKS):
        same_training(found[0], expected)
        assert found[1:] == (tokens, operations)


SAVED: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}


def saved_and_resumed(folder: str, config: Any, model: Any) -> tuple[Ran, Ran, list[str], list[str]]:
    """A run that saves, a run from the middle of it, the files of the checkpoint and its parameters."""
    whole = run(folder, config, model=model, **SAVED)
    middle = Path(folder, "checkpoint-2")
    files, inside = sorted(path.name for path in middle.iterdir()), load_checkpoint(middle / "composer_dist")
    return whole, run(folder, config, str(middle), model=model), files, sorted(inside["model"])


@pytest.mark.parametrize(
    ("mode", "model"),
    [slow("fsdp", dropping_gpt2), ("ddp", dropping_gpt2), slow("tp", dropping_gpt2), ("fsdp", lora_llama)],
)
def test_resumes_bit_for_bit(world2: World, tmp_path: Path, mode: str, model: Any) -> None:
    """With dropout, momenta, a schedule and shuffled rows."""
    exports = {"adapter_model.safetensors"} if model is lora_llama else {"model.safetensors", "config.json"}
    for whole, resumed, files, inside in world2(
        saved_and_resumed, str(tmp_path), MODES[mode], model, **RANKS
    ):
        assert len(resumed.losses) == 4  # the log of the first two is in trainer_state.json
        assert resumed.losses == whole.losses
        assert resumed.norms == whole.norms
        same(resumed.parameters, whole.parameters)
        assert exports | {"composer_dist", "rng_state_1.pth"} <= {*files}
        assert all("lora" in name for name in inside) == (model is lora_llama)


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


class Words(nn.Module):
    """A model that is not transformers'."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.middle = nn.Embedding(50, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 50)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.middle(self.table(input_ids)))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def adapted_words() -> Any:
    from peft import LoraConfig, get_peft_model

    options = {"target_modules": ["middle"], "modules_to_save": ["head"], "init_lora_weights": False}
    return get_peft_model(Words(), LoraConfig(r=2, **options))


def test_exports_the_adapter_of_a_model_that_is_not_transformers_own(world2: World, tmp_path: Path) -> None:
    from peft import PeftModel

    [parameters, _] = world2(exported, str(tmp_path), "fsdp", adapted_words, **RANKS)
    torch.manual_seed(0)
    same(weights(PeftModel.from_pretrained(Words(), tmp_path)), parameters)


def two_adapters() -> Any:
    """The second is trained, and the first is frozen."""
    from peft import LoraConfig

    model = lora_llama()
    more = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], init_lora_weights=False)
    model.add_adapter("second", more)
    model.set_adapter("second")
    return model


def other_adapters() -> Any:
    model = two_adapters()
    for name, parameter in model.named_parameters():
        if "lora" in name:
            nn.init.normal_(parameter)
    return model


def adapters_loaded(folder: str) -> dict[str, Tensor]:
    trainer = made(folder, "fsdp", other_adapters)
    trainer._load_from_checkpoint(f"{folder}/checkpoint-2")
    return result(trainer).parameters


@pytest.mark.parametrize(
    ("config", "options"),
    [(None, {}), ("fsdp", {"save_only_model": True}), ("fsdp", {})],
    ids=["of the Trainer", "of exports", "of ours"],
)
def test_a_checkpoint_has_every_adapter(
    world1: World, world2: World, tmp_path: Path, config: Any, options: Any
) -> None:
    world, setup = (world2, RANKS) if config else (world1, ONE)
    saved = world(run, str(tmp_path), config, model=two_adapters, max_steps=2, **SAVED, **options, **setup)
    for found in world2(adapters_loaded, str(tmp_path), **RANKS):
        same(found, saved[0].parameters)


def right(prediction: Any) -> dict[str, float]:
    """How many tokens are right, and of how many."""
    logits, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    known = labels != -100
    return {"right": float((logits.argmax(-1) == labels)[known].sum()), "tokens": float(known.sum())}


def evaluated(folder: str, config: Any = None) -> tuple[dict[str, float], Any, Any]:
    """Metrics before training, and predictions; the batches divide neither number of rows."""
    from datasets import Dataset

    data = Dataset.from_list(rows(23, seed=2))
    trainer = made(folder, config, trainer={"eval_dataset": data, "compute_metrics": right})
    metrics, predicted = trainer.evaluate(), trainer.predict(data.select(range(19)))
    named = {name: metrics[name] for name in ("eval_loss", "eval_right", "eval_tokens")}
    return named, predicted.predictions, predicted.label_ids


@pytest.mark.parametrize("mode", [slow(one) if one == "ddp" else one for one in [*MODES, "loss_parallel"]])
def test_evaluates_and_predicts_each_row_once(
    world1: World, world2: World, tmp_path: Path, mode: str
) -> None:
    [(metrics, logits, labels)] = world1(evaluated, str(tmp_path), **ONE)
    assert logits.shape == (19, 12, 50)
    modes = MODES | {"loss_parallel": TP | {"tp": {"loss_parallel": True}}}
    for found, its_logits, its_labels in world2(evaluated, str(tmp_path), modes[mode], **RANKS):
        assert found == pytest.approx(metrics, rel=1e-5)
        assert its_logits == pytest.approx(logits, abs=1e-5)
        assert (its_labels == labels).all()


def evaluated_stream(folder: str, config: Any = None) -> list[float]:
    """Losses of streams, by tokens and by rows, whose last batch has no full share for any rank."""
    from datasets import Dataset

    data = Dataset.from_list(rows(21, seed=2))
    labeled = Dataset.from_list([{**row, "labels": n % 3} for n, row in enumerate(rows(21))])
    return [
        made(folder, config, model, {"eval_dataset": one.to_iterable_dataset()}).evaluate()["eval_loss"]
        for model, one in ((llama, data), (classifier, labeled))
    ]


def test_evaluates_each_row_of_a_stream_once(world1: World, world2: World, tmp_path: Path) -> None:
    [expected] = world1(evaluated_stream, str(tmp_path), **ONE)
    for found in world2(evaluated_stream, str(tmp_path), "fsdp", **RANKS):
        assert found == pytest.approx(expected, rel=1e-5)


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


@pytest.mark.parametrize("mode", ["fsdp", slow("tp")])
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


def generated(folder: str, config: Any = None) -> list[int]:
    """What a model with adapters writes after training."""
    trainer = made(folder, config, lora_llama)
    trainer.train()
    prompt = torch.arange(3, 8)[None]
    return trainer.model.generate(input_ids=prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)[
        0
    ].tolist()


def test_generates_after_training(world1: World, world2: World, tmp_path: Path) -> None:
    [expected] = world1(generated, str(tmp_path), **ONE)
    config = {"forward_methods": ["generate"]}
    assert world2(generated, str(tmp_path), config, **RANKS) == [expected, expected]


def mixed_precision(folder: str, config: Any = None, **options: Any) -> tuple[list[float], set[torch.dtype]]:
    trainer = made(folder, config, **options)
    trainer.train()
    return result(trainer).losses, {one.dtype for one in trainer.model.parameters()}


def test_either_of_the_two_casts(world1: World, world2: World, tmp_path: Path) -> None:
    [(expected, _)] = world1(mixed_precision, str(tmp_path), bf16=True, **ONE)
    for options in ({"bf16": True}, {"trainer": {"precision": "amp_bf16"}}):
        for losses, dtypes in world2(mixed_precision, str(tmp_path), "fsdp", **options, **RANKS):
            assert losses == pytest.approx(expected, rel=2e-3)
            assert dtypes == {torch.float32}
