"""What the losses of transformers' models average over: parts of a batch are weighted by it."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.auto import modeling_auto

from composer_dist.models import HuggingFaceModel
from composer_dist.trainer import State
from composer_dist.trainer.data.batch import split
from composer_dist.trainer.step import weight_of
from tests.zoo.batches import make_batch
from tests.zoo.configs import toy_config

SEGMENTERS = ["mobilenet_v2", "mobilevit", "mobilevitv2", "segformer", "upernet"]
"""Those that build at toy size."""


def built(mapping: str, name: str, **options: Any) -> tuple[Any, dict[str, Tensor]]:
    """A toy model in eval mode, and two samples without labels."""
    config = toy_config(name)
    for key, value in options.items():
        setattr(config, key, value)
    cls: Any = getattr(transformers, getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES")[name])
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


@pytest.mark.parametrize("name", SEGMENTERS)
def test_pixels_that_the_configuration_ignores_do_not_count(name: str) -> None:
    model, batch = built("SEMANTIC_SEGMENTATION", name, num_labels=3)
    height, width = batch["pixel_values"].shape[-2:]
    labels = torch.randint(3, (2, height, width))
    labels[0, : height - 2] = 255
    wrapped = parts_are_the_whole(model, batch | {"labels": labels})
    assert wrapped.loss_weight({"labels": labels}) == (labels != 255).sum()


def test_a_mask_of_one_class_counts_all_pixels() -> None:
    model, batch = built("SEMANTIC_SEGMENTATION", "segformer", num_labels=1)
    labels = torch.randint(2, (2, *batch["pixel_values"].shape[-2:]))
    labels[0, 2:] = 255
    wrapped = parts_are_the_whole(model, batch | {"labels": labels})
    assert wrapped.loss_weight({"labels": labels}) == labels.numel()


@pytest.mark.parametrize("name", modeling_auto.MODEL_FOR_CTC_MAPPING_NAMES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_loss_of_ctc_is_a_mean_over_samples(name: str, reduction: str) -> None:
    model, batch = built("CTC", name, vocab_size=32, ctc_loss_reduction=reduction, ctc_zero_infinity=True)
    batch["labels"] = torch.tensor([[5, 6, 5, 7], [8, -100, -100, -100]])
    wrapped = parts_are_the_whole(model, batch)
    assert wrapped.loss_weight(batch) == 2
    own = model(**batch).loss
    torch.testing.assert_close(wrapped.loss(wrapped(batch), batch), own / 2 if reduction == "sum" else own)


def test_answers_outside_of_the_input_do_not_count() -> None:
    model, batch = built("QUESTION_ANSWERING", "bert")
    length = batch["input_ids"].shape[1]
    answers = torch.tensor([length + 1, 2, 3, 1])
    given = {key: torch.cat([value, value]) for key, value in batch.items()}
    given |= {"start_positions": answers, "end_positions": answers + 1}
    assert parts_are_the_whole(model, given).loss_weight(given) == 3
