"""DPO with the adapter off as the reference: TRL's losses, on one process and on two."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from composer_dist import HuggingFaceModel, MeshConfig, ParallelismConfig, TPConfig, Trainer
from composer_dist.checkpoint import full_model_state
from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.models import DPOModel, PreferenceAccuracy
from composer_dist.trainer import DistributedDataLoader, InMemoryLogger, PadPreferences, PreferenceTokenizer
from tests.kit.chat import chat_tokenizer
from tests.kit.grids import crossed, slow
from tests.kit.huggingface import built, llama
from tests.kit.preferences import PREFERENCES, adapted, of_trl, train_a_little
from tests.kit.world import World

pytestmark = [pytest.mark.promise(125), pytest.mark.filterwarnings("ignore")]  # TRL's and peft's own


def batch_of(tokenizer: Any, rows: Any = PREFERENCES) -> Any:
    return PadPreferences(tokenizer.pad_token_id)(PreferenceTokenizer(tokenizer).map(rows))


@crossed({"loss": ["sigmoid", "hinge", "ipo"], "beta": [0.1, 2.0]})
def test_losses_and_gradients_are_those_of_trl(loss: Any, beta: float, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="an extra")
    tokenizer = chat_tokenizer()
    trainer = of_trl(tokenizer, PREFERENCES, tmp_path, loss_type=[loss], beta=beta)
    train_a_little(trainer.model)
    model = adapted(len(tokenizer))
    model.load_state_dict(trainer.model.state_dict())
    ours = DPOModel(model, tokenizer, beta=beta, preference_loss=loss)
    inputs = trainer.data_collator(list(trainer.train_dataset))
    theirs = trainer.compute_loss(trainer.model, inputs)
    theirs.backward()
    batch = batch_of(tokenizer)
    found = ours.loss(ours(batch), batch)
    found.backward()
    assert float(found) == pytest.approx(float(theirs), rel=1e-5)
    expected = {name: one.grad for name, one in trainer.model.named_parameters() if one.grad is not None}
    gradients = {name: one.grad for name, one in ours.model.named_parameters() if one.requires_grad}
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


def test_the_reference_is_the_model_without_its_adapter() -> None:
    tokenizer = chat_tokenizer()
    batch = batch_of(tokenizer)
    untrained = DPOModel(adapted(len(tokenizer), untrained=True), tokenizer)
    outputs = untrained(batch)
    assert outputs.tolist() == [[0.0, 0.0]] * len(PREFERENCES)
    assert float(untrained.loss(outputs, batch)) == pytest.approx(0.6931472)
    model = DPOModel(adapted(len(tokenizer)), tokenizer)
    metric = model.get_metrics()["PreferenceAccuracy"]
    outputs = model(batch)
    model.update_metric(batch, model.eval_forward(batch, outputs), metric)
    assert isinstance(metric, PreferenceAccuracy)
    assert float(metric.compute()) == float((outputs[:, 0] > outputs[:, 1]).double().mean())
    assert all(one.requires_grad for name, one in model.named_parameters() if "lora" in name)


@pytest.mark.parametrize("disabled", [True, False])
def test_an_untrained_adapter_equals_the_reference_unless_dropout_is_kept(disabled: bool) -> None:
    tokenizer = chat_tokenizer()
    model = built("GPT2LMHeadModel", vocab_size=len(tokenizer), n_embd=16, n_layer=2, n_head=2)
    adapter = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    dpo = DPOModel(model, tokenizer, peft_config=adapter, disable_dropout=disabled).train()
    assert bool((dpo(batch_of(tokenizer)) == 0).all()) == disabled


def test_models_without_an_adapter_and_other_batches_are_refused() -> None:
    with pytest.raises(ParallelismValueError, match="DPO needs an adapter"):
        DPOModel(llama())
    with pytest.raises(ParallelismValueError, match="preference_loss must be one of 'sigmoid', 'hinge'"):
        DPOModel(llama(), preference_loss="dpo")  # type: ignore[arg-type]
    tokens = torch.ones(2, 3, dtype=torch.long)
    with pytest.raises(ParallelismTypeError, match="those of PadPreferences"):
        DPOModel(adapted(320))({"input_ids": tokens, "labels": tokens})
    assert issubclass(DPOModel, HuggingFaceModel)


def learned(parallelism: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of three steps of two microbatches each, and the trained weights."""
    tokenizer = chat_tokenizer()
    model = DPOModel(adapted(len(tokenizer), untrained=True), tokenizer)
    rows = PreferenceTokenizer(tokenizer).map(PREFERENCES)
    log = InMemoryLogger()
    Trainer(
        model=model,
        optimizers=torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2),
        train_dataloader=DistributedDataLoader(
            rows, global_batch_size=4, collate_fn=PadPreferences(tokenizer.pad_token_id)
        ),
        max_duration="3ba",
        parallelism_config=parallelism,
        device_train_microbatch_size=1,
        loggers=log,
        progress_bar=False,
        seed=1,
    ).fit()
    return log.values("loss/train/total"), full_model_state(model, ranks="all")


TP = ParallelismConfig(mesh=MeshConfig(dp_shard=1, tp=2), tp=TPConfig())
TP_LOSS = ParallelismConfig(mesh=MeshConfig(dp_shard=1, tp=2), tp=TPConfig(loss_parallel=True))


@pytest.mark.parametrize(
    "parallelism", ["fsdp", "ddp", slow(TP), slow(TP_LOSS)], ids=["fsdp", "ddp", "tp", "tp-loss"]
)
def test_every_mode_trains_as_one_process(parallelism: Any, world1: World, world2: World) -> None:
    ((losses, weights),) = world1(learned, None)
    assert losses[0] == pytest.approx(0.6931472)
    assert losses[2] < losses[1] < losses[0]
    (found, trained), _ = world2(learned, parallelism)
    assert found == pytest.approx(losses, rel=1e-4)
    assert trained.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(trained[name], weight, rtol=1e-3, atol=1e-5)
