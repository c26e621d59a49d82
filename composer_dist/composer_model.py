"""The interface of models that the Trainer can train, with Composer's names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.wording import listed

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection


class ComposerModel(nn.Module, ABC):
    """A model that takes a whole batch from the dataloader and computes its loss and metrics.

    `forward` and `loss` are enough to train. Keep metrics in a plain dictionary, as
    `ComposerClassifier` does: a metric that is an attribute becomes a submodule, and its state part
    of the model's buffers.
    """

    only_loss = False
    """Whether only the loss of the outputs is read; the Trainer sets it to evaluate without metrics."""

    @abstractmethod
    def forward(self, batch: Any) -> Any:
        """The outputs for a batch from the dataloader."""

    @abstractmethod
    def loss(self, outputs: Any, batch: Any) -> Any:
        """The mean loss of a batch: a scalar, or a sequence or mapping of scalars to be summed."""

    def loss_weight(self, batch: Any) -> float | None:
        """The number of terms that `loss` averages over in this batch; None means its samples.

        The Trainer weights each microbatch of each rank by it, so that gradients equal those of
        the whole batch at once. A model whose loss averages over tokens returns their number.
        """
        return None

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        """The input of `update_metric` and result of `Trainer.predict`; `outputs` are reused if given."""
        return self(batch) if outputs is None else outputs

    def get_metrics(self, is_train: bool = False) -> dict[str, Metric]:
        """The metrics to compute during training or evaluation, by name."""
        return {}

    def update_metric(self, batch: Any, outputs: Any, metric: Metric) -> None:
        """Adds one batch to `metric`; `outputs` come from `eval_forward`."""
        raise NotImplementedError(
            f"{type(self).__name__} has metrics, so it needs update_metric(batch, outputs, metric)."
        )


class ComposerClassifier(ComposerModel):
    """A `ComposerModel` of any classifier, for batches `(inputs, targets)`.

    Args:
        module: called with the inputs, returns logits `(samples, classes)`.
        num_classes: for the default metric, the accuracy; else the module's own `num_classes`.
        train_metrics: torchmetrics to compute during training.
        val_metrics: torchmetrics to compute during evaluation.
        loss_fn: `(logits, targets) -> scalar`, a mean over samples; targets may be class indices or
            probabilities.

    Raises:
        ParallelismValueError: a default metric is needed, but the number of classes is unknown.
    """

    def __init__(
        self,
        module: nn.Module,
        num_classes: int | None = None,
        train_metrics: Metric | MetricCollection | Mapping[str, Metric] | None = None,
        val_metrics: Metric | MetricCollection | Mapping[str, Metric] | None = None,
        loss_fn: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy,
    ) -> None:
        super().__init__()
        self.module = module
        self.num_classes = num_classes or getattr(module, "num_classes", None)
        self._loss_fn = loss_fn
        # Dictionaries, so that nn.Module does not take the metrics for submodules.
        self.train_metrics = self._named(train_metrics)
        self.val_metrics = self._named(val_metrics)

    def forward(self, batch: Any) -> Any:
        """The logits `(samples, classes)` of the batch's inputs."""
        inputs, _ = batch
        return self.module(inputs)

    def loss(self, outputs: Any, batch: Any) -> Any:
        """The mean over the samples."""
        _, targets = batch
        return self._loss_fn(outputs, targets)

    def loss_weight(self, batch: Any) -> float | None:
        """The number of targets that the default loss averages over: those that are not -100."""
        _, targets = batch
        if self._loss_fn is functional.cross_entropy and not targets.is_floating_point():
            return float((targets != -100).sum())
        return None

    def get_metrics(self, is_train: bool = False) -> dict[str, Metric]:
        """The metrics given at construction, or the accuracy."""
        return self.train_metrics if is_train else self.val_metrics

    def update_metric(self, batch: Any, outputs: Any, metric: Metric) -> None:
        """Adds the batch's logits and targets."""
        _, targets = batch
        metric.update(outputs, targets)

    def _named(self, metrics: Any) -> dict[str, Metric]:
        from torchmetrics import Metric

        if metrics is None:
            return {"MulticlassAccuracy": self._accuracy()}
        if isinstance(metrics, Metric):
            return {type(metrics).__name__: metrics}
        named = dict(metrics.items())
        if strangers := [name for name, metric in named.items() if not isinstance(metric, Metric)]:
            raise ParallelismTypeError(
                f"These metrics are not torchmetrics.Metric objects: {', '.join(strangers)}."
            )
        return named

    def _accuracy(self) -> Metric:
        from torchmetrics.classification import MulticlassAccuracy

        if self.num_classes is None:
            raise ParallelismValueError(
                "ComposerClassifier needs num_classes for its accuracy; pass it, give the module a "
                "num_classes attribute, or pass train_metrics and val_metrics."
            )
        with torch.device("cpu"):  # a model may be built on meta; its counts are not weights
            return MulticlassAccuracy(num_classes=self.num_classes, average="micro")


def check_model(model: object) -> None:
    """Refuses anything but a `ComposerModel`."""
    if not isinstance(model, ComposerModel):
        raise ParallelismTypeError(
            f"The Trainer needs a ComposerModel, not {type(model).__name__}: wrap a classifier in "
            "ComposerClassifier, a transformers or peft model in HuggingFaceModel, or subclass "
            "ComposerModel and give it forward and loss."
        )


def check_has_values(model: nn.Module) -> None:
    """Refuses a model on the meta device, which nothing will initialize."""
    tensors = chain(model.named_parameters(), model.named_buffers())
    if on_meta := [name for name, tensor in tensors if tensor.is_meta]:
        raise ParallelismValueError(
            f"{listed(on_meta, 5)} {'is' if len(on_meta) == 1 else 'are'} on the meta device, without "
            "values. Pass a parallelism_config, which initializes the model, or build it on a real device."
        )
