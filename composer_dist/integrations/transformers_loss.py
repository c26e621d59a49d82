"""The loss of transformers' Trainer without all logits, where nobody reads them."""

from typing import TYPE_CHECKING, Any

import transformers
from torch import nn

from composer_dist.losses.logits import put_off

if TYPE_CHECKING:
    _Trainer = transformers.Trainer
else:
    _Trainer = object


class ChunkedLossMixin(_Trainer):
    """Has the model compute its loss in chunks, if the Trainer takes the model's loss as it is.

    A trainer with a `compute_loss` of its own (TRL's have one, most without logits too), label smoothing or
    `compute_loss_func` reads logits; so does an evaluation with `compute_metrics`.
    """

    chunked_loss: bool | int = True
    _only_loss = False
    """True in an evaluation that keeps no outputs."""

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """As the trainer's."""
        theirs = super().compute_loss
        own = getattr(theirs, "__func__", None) is not transformers.Trainer.compute_loss
        read = own or self.label_smoother is not None or self.compute_loss_func is not None
        if (
            not self.chunked_loss
            or read
            or "labels" not in inputs
            or (return_outputs and not self._only_loss)
        ):
            return theirs(model, inputs, return_outputs, num_items_in_batch)
        with put_off(base_model(model), None if self.chunked_loss is True else self.chunked_loss):
            return theirs(model, inputs, return_outputs, num_items_in_batch)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        """As the trainer's."""
        self._only_loss = prediction_loss_only
        try:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        finally:
            self._only_loss = False


def base_model(model: Any) -> Any:
    """The transformers model inside a `PeftModel`, or `model` itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
