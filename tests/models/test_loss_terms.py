"""Which labels the losses of transformers' models compare, and what they average over."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional
from transformers.models.auto import modeling_auto

from composer_dist.models import HuggingFaceModel
from composer_dist.models.loss_terms import UNSHIFTED
from composer_dist.trainer import State
from composer_dist.trainer.data.batch import split
from composer_dist.trainer.step import weight_of
from tests.kit.grids import in_the_default_run
from tests.zoo.batches import make_batch
from tests.zoo.configs import toy_config

SEGMENTERS = ["mobilenet_v2", "mobilevit", "mobilevitv2", "segformer", "upernet"]
"""Those that build at toy size."""
CAUSAL = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
UNBUILT = {
    "dots3_note", "gemma3n", "gemma4_assistant", "gemma4_unified_assistant", "musicgen", "musicgen_melody",
    "prophetnet", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "reformer",
}  # fmt: skip
"""Causal language models that do not build at toy size, or whose loss is not a plain cross-entropy."""


def built(mapping: str, name: str, **options: Any) -> tuple[Any, dict[str, Tensor]]:
    """A toy model in eval mode, and two samples without labels."""
    cls: Any = getattr(transformers, getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES")[name])
    config: Any = toy_config(name)
    if not isinstance(config, cls.config_class):
        config = config.get_text_config()
    for key, value in options.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    batch = make_batch(name, cls, config)
    batch.pop("labels", None)
    return cls(config).eval(), batch


def gradients(model: HuggingFaceModel, *batches: dict[str, Tensor]) -> tuple[float, Tensor]:
    """The loss, and its gradients, of batches that the Trainer weights as parts of one."""
    weights = [weight_of(State(model=model), batch) for batch in batches]
    model.zero_grad()
    parts = zip(weights, batches, strict=True)
    losses = [weight / sum(weights) * model.loss(model(part), part) for weight, part in parts]
    total = torch.stack(losses).sum()
    total.backward()
    return total.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def parts_are_the_whole(model: Any, batch: dict[str, Tensor]) -> HuggingFaceModel:
    """Checks the loss and the gradients of the batch in two parts; returns the model that computed them."""
    wrapped = HuggingFaceModel(model)
    parts = split(batch, 2)
    loss, expected = gradients(wrapped, batch)
    found, gradient = gradients(wrapped, *parts)
    assert found == pytest.approx(loss, rel=1e-5)
    assert (gradient - expected).norm() <= 1e-4 * expected.norm()
    return wrapped


def causal_variants() -> list[Any]:
    names = sorted(CAUSAL.keys() - UNBUILT)
    return in_the_default_run("gpt2", "llama", *(n for n in names if CAUSAL[n] in UNSHIFTED), among=names)


@pytest.mark.promise(98)
@pytest.mark.parametrize("name", causal_variants())
def test_causal_language_models_shift_labels_if_their_losses_do(name: str) -> None:
    model, batch = built("CAUSAL_LM", name, is_decoder=True)
    for matrix in (parameter for parameter in model.parameters() if parameter.ndim > 1):
        matrix.data *= 3  # else all labels are about as probable
    batch.pop("decoder_input_ids", None)
    labels = torch.randint(10, 30, batch["input_ids"].shape)
    outputs = model(**batch, labels=labels)
    shifts = HuggingFaceModel(model).shift_labels
    logits = outputs.logits[:, -labels.shape[1] : -1 if shifts else None].float()
    expected = functional.cross_entropy(logits.flatten(0, 1), labels[:, int(shifts) :].flatten())
    torch.testing.assert_close(outputs.loss.float(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.promise(99)
@pytest.mark.parametrize("name", SEGMENTERS)
def test_pixels_that_the_configuration_ignores_do_not_count(name: str) -> None:
    model, batch = built("SEMANTIC_SEGMENTATION", name, num_labels=3)
    height, width = batch["pixel_values"].shape[-2:]
    labels = torch.randint(3, (2, height, width))
    labels[0, : height - 2] = 255
    wrapped = parts_are_the_whole(model, batch | {"labels": labels})
    assert wrapped.loss_weight({"labels": labels}) == (labels != 255).sum()


@pytest.mark.promise(99)
def test_a_mask_of_one_class_counts_all_pixels() -> None:
    model, batch = built("SEMANTIC_SEGMENTATION", "segformer", num_labels=1)
    labels = torch.randint(2, (2, *batch["pixel_values"].shape[-2:]))
    labels[0, 2:] = 255
    wrapped = parts_are_the_whole(model, batch | {"labels": labels})
    assert wrapped.loss_weight({"labels": labels}) == labels.numel()


@pytest.mark.promise(99)
@pytest.mark.parametrize("name", modeling_auto.MODEL_FOR_CTC_MAPPING_NAMES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_loss_of_ctc_is_a_mean_over_samples(name: str, reduction: str) -> None:
    model, batch = built("CTC", name, vocab_size=32, ctc_loss_reduction=reduction, ctc_zero_infinity=True)
    batch["labels"] = torch.tensor([[5, 6, 5, 7], [8, -100, -100, -100]])
    wrapped = parts_are_the_whole(model, batch)
    assert wrapped.loss_weight(batch) == 2
    own = model(**batch).loss
    torch.testing.assert_close(wrapped.loss(wrapped(batch), batch), own / 2 if reduction == "sum" else own)


@pytest.mark.promise(99)
def test_answers_outside_of_the_input_do_not_count() -> None:
    model, batch = built("QUESTION_ANSWERING", "bert")
    length = batch["input_ids"].shape[1]
    answers = torch.tensor([length + 1, 2, 3, 1])
    given = {key: torch.cat([value, value]) for key, value in batch.items()}
    given |= {"start_positions": answers, "end_positions": answers + 1}
    assert parts_are_the_whole(model, given).loss_weight(given) == 3
