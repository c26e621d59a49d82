"""Direct preference optimization (DPO), with the model without its adapter as the reference.

Rafailov et al., 2023, arXiv:2305.18290. The losses are those of TRL's DPOTrainer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import Metric

from composer_dist.config.base import require
from composer_dist.distributed import parallel_cross_entropy
from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.models.huggingface import HuggingFaceModel
from composer_dist.models.metrics import PreferenceAccuracy

_LOSSES = ("sigmoid", "hinge", "ipo")


class DPOModel(HuggingFaceModel):
    """A causal language model with an adapter that learns which of two answers is preferred.

    Its batches come from `PadPreferences`. Its outputs give for each pair how much more probable, as a
    logarithm, each answer is than without the adapter: `(pairs, 2)`, the chosen ones first.

    Args:
        model: a `PeftModel`, or a transformers model and a `peft_config`.
        tokenizer: exported with the model.
        beta: how much the model may differ from the reference; less for larger values.
        preference_loss: "sigmoid" (DPO), "hinge" (SLiC, arXiv:2305.10425) or "ipo" (arXiv:2310.12036).
        disable_dropout: set the probability of every `nn.Dropout` in the model and its adapter to 0, as TRL
            does. With dropout the reference is noisy, and an untrained adapter differs from it. Dropout that
            a model applies without such a module (OPT) stays on; set it to 0 in the model's configuration.
        options: of `HuggingFaceModel`; the metric is by default the `PreferenceAccuracy`.

    Raises:
        ParallelismValueError: there is no adapter that can be turned off; `beta` is not positive.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        *,
        beta: float = 0.1,
        preference_loss: Literal["sigmoid", "hinge", "ipo"] = "sigmoid",
        disable_dropout: bool = True,
        **options: Any,
    ) -> None:
        require("preference_loss", preference_loss, _LOSSES)
        if beta <= 0:
            raise ParallelismValueError(f"beta must be positive, not {beta}.")
        super().__init__(model, tokenizer, **{"metrics": [PreferenceAccuracy()], **options})
        self.beta, self.preference_loss = beta, preference_loss
        if not list(_layers(self.model)):
            raise ParallelismValueError(
                "DPO needs an adapter in the model's layers, such as LoRA's: without it the model is the "
                "reference. Pass peft_config=LoraConfig(...), in YAML model.adapter."
            )
        if disable_dropout:
            for module in self.model.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0

    def forward(self, batch: Any) -> Tensor:
        """How much more probable the answers are than without the adapter, `(pairs, 2)`."""
        if not isinstance(batch, Mapping) or batch["input_ids"].ndim != 3:
            raise ParallelismTypeError("DPOModel's batches are those of PadPreferences: (pairs, 2, tokens).")
        flat: dict[str, Tensor] = {
            name: batch[name].flatten(0, 1) for name in ("input_ids", "attention_mask", "labels")
        }
        with torch.no_grad(), _without_adapter(self.model):
            reference = self._log_probabilities(**flat)
        learned: Tensor = self._log_probabilities(**flat) - reference
        return learned.view(-1, 2)

    def _log_probabilities(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        """Of each row's labels together, `(rows,)`."""
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        next_labels = functional.pad(labels[:, 1:], (0, 1), value=-100)
        return -parallel_cross_entropy(outputs.logits, next_labels, reduction="none").sum(1)

    def loss(self, outputs: Any, batch: Any) -> Any:
        """The mean over pairs."""
        if self.preference_loss == "ipo":
            labels = (batch["labels"] != -100).sum(-1).clamp(min=1)
            chosen, rejected = (outputs / labels).unbind(1)
            return ((chosen - rejected - 1 / (2 * self.beta)) ** 2).mean()
        chosen, rejected = outputs.unbind(1)
        margins = self.beta * (chosen - rejected)
        if self.preference_loss == "hinge":
            return torch.relu(1 - margins).mean()
        return -functional.logsigmoid(margins).mean()

    def loss_weight(self, batch: Any) -> float | None:
        """None: the loss averages over pairs, which are the samples."""
        return None

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        """As `forward`."""
        return self(batch) if outputs is None else outputs

    def update_metric(self, batch: Any, outputs: Any, metric: Metric) -> None:
        """Adds the batch's outputs."""
        metric.update(outputs)


def _layers(model: nn.Module) -> Iterator[Any]:
    """The layers that have an adapter, and the copies that peft trains in addition."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    kinds: Any = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    return (module for module in model.modules() if isinstance(module, kinds))


@contextmanager
def _without_adapter(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes without its adapter.

    peft's `disable_adapter` also freezes its parameters for that time, which FSDP2 and DDP would notice.
    """
    layers = list(_layers(model))
    before = [layer._disable_adapters for layer in layers]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, value in zip(layers, before, strict=True):
            layer._disable_adapters = value
