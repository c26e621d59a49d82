"""Metrics of logits and labels, as `HuggingFaceModel(use_logits=True)` gives them."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torchmetrics import Metric

IGNORED = -100


class _Mean(Metric):
    """A total over a count, of all ranks and batches."""

    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def compute(self) -> Tensor:
        """The mean."""
        return self.total / self.count


class _OverLabels(_Mean):
    """A mean over all labels that are not -100."""

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Adds a batch.

        Args:
            logits: `(..., classes)`.
            labels: `(...)`; -100 is ignored.
        """
        counted = labels != IGNORED
        self.total += self.of(logits[counted], labels[counted]).double()
        self.count += counted.sum()

    def of(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The sum over labels `(n,)`."""
        raise NotImplementedError


class LanguagePerplexity(_OverLabels):
    """The exponential of the mean cross-entropy of all labels, of all ranks and batches."""

    def of(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The sum of the cross-entropies."""
        return functional.cross_entropy(logits.float(), labels, reduction="sum")

    def compute(self) -> Tensor:
        """The perplexity."""
        return super().compute().exp()


class TokenAccuracy(_OverLabels):
    """The share of labels that have the greatest logit: of tokens, or of samples' classes."""

    def of(self, logits: Tensor, labels: Tensor) -> Tensor:
        """How many."""
        return (logits.argmax(-1) == labels).sum()


class PreferenceAccuracy(_Mean):
    """The share of pairs whose chosen answer has become more probable than the rejected one has."""

    def update(self, outputs: Tensor) -> None:
        """Adds outputs `(pairs, 2)` of a `DPOModel`."""
        self.total += (outputs[:, 0] > outputs[:, 1]).sum()
        self.count += len(outputs)
