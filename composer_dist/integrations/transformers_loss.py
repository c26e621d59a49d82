"""The model's loss in transformers' Trainer.

Without all logits where nobody reads them, and multiplied by the ranks only if the model divides by the count
of all ranks' items.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import transformers
from torch import Tensor, nn

from composer_dist._torch import Noted
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
        if own or self.label_smoother is not None or self.compute_loss_func is not None:
            return theirs(model, inputs, return_outputs, num_items_in_batch)
        chunked = self.chunked_loss and "labels" in inputs and (not return_outputs or self._only_loss)
        size = None if self.chunked_loss is True else self.chunked_loss
        with put_off(base_model(model), size) if chunked else nullcontext():
            if not self.model_accepts_loss_kwargs or not isinstance(num_items_in_batch, Tensor):
                return theirs(model, inputs, return_outputs, num_items_in_batch)
            return self._read_or_ignored(theirs, model, inputs, return_outputs, num_items_in_batch)

    _reads_count: bool | None = None
    """Whether the model divides its loss by the count of all ranks' items; None until one has shown it."""

    def _read_or_ignored(
        self, theirs: Callable[..., Any], model: nn.Module, inputs: Any, return_outputs: bool, count: Tensor
    ) -> Any:
        """The trainer's loss, which multiplies by the ranks what the model has divided by the count.

        It takes each model whose forward has keywords for one that divides. A classifier that ignores the
        count returns the mean of its rows, and would have the sum of all ranks' losses and gradients.
        """
        if self._reads_count is None:
            with Noted.noting() as read:
                found = theirs(model, inputs, return_outputs, count.as_subclass(Noted))
            self._reads_count = bool(read)
        else:
            found = theirs(model, inputs, return_outputs, count)
        if self._reads_count or not self.args.average_tokens_across_devices:
            return found
        ranks = self.accelerator.num_processes // self.get_tp_size()
        return (found[0] / ranks, found[1]) if return_outputs else found / ranks

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
