"""Perplexity and token accuracy: over all labels, however they are batched."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from composer_dist import HuggingFaceModel
from composer_dist.models import LanguagePerplexity, TokenAccuracy
from tests.kit.huggingface import llama

pytestmark = pytest.mark.promise(125)


def test_metrics_are_those_of_all_labels_at_once() -> None:
    logits = torch.randn(4, 6, 10, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(10, (4, 6), generator=torch.Generator().manual_seed(1))
    labels[0, 1:] = -100
    perplexity, accuracy = LanguagePerplexity(), TokenAccuracy()
    for part in (slice(0, 1), slice(1, 4)):
        perplexity.update(logits[part], labels[part])
        accuracy.update(logits[part], labels[part])
    loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert float(perplexity.compute()) == pytest.approx(float(loss.exp()), rel=1e-6)
    counted = labels != -100
    assert float(accuracy.compute()) == pytest.approx(
        float((logits.argmax(-1) == labels)[counted].double().mean())
    )


def test_a_causal_models_perplexity_is_the_exponential_of_its_loss() -> None:
    model = HuggingFaceModel(llama(), use_logits=True, metrics=[LanguagePerplexity(), TokenAccuracy()])
    tokens = torch.randint(50, (2, 7), generator=torch.Generator().manual_seed(0))
    batch: dict[str, Any] = {"input_ids": tokens, "labels": tokens.clone()}
    with torch.no_grad():
        outputs = model(batch)
    metrics = model.get_metrics()
    for metric in metrics.values():
        model.update_metric(batch, model.eval_forward(batch, outputs), metric)
    assert float(metrics["LanguagePerplexity"].compute()) == pytest.approx(
        float(outputs.loss.exp()), rel=1e-5
    )
    right = outputs.logits[:, :-1].argmax(-1) == tokens[:, 1:]
    assert float(metrics["TokenAccuracy"].compute()) == pytest.approx(float(right.double().mean()))
