"""Which labels the losses of transformers' models compare, and what they average over."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from torch import Tensor

IGNORED = -100
"""The label that transformers' losses and metrics skip."""
UNSHIFTED = frozenset((
    "BartForCausalLM", "BigBirdPegasusForCausalLM", "BlenderbotForCausalLM", "BlenderbotSmallForCausalLM",
    "CpmAntForCausalLM", "MarianForCausalLM", "MBartForCausalLM", "MusicgenForCausalLM",
    "MusicgenMelodyForCausalLM", "MvpForCausalLM", "PegasusForCausalLM", "PLBartForCausalLM",
    "ProphetNetForCausalLM", "TrOCRForCausalLM", "WhisperForCausalLM", "XLMWithLMHeadModel",
    "XLNetLMHeadModel",
))  # fmt: skip
"""The causal language models of transformers 5.23 that compare position i with label i."""


def shifts_labels(base: Any) -> bool:
    """Whether the model's own loss compares position i with label i + 1."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )

    names = {cls.__name__ for cls in type(base).__mro__}
    if not names.isdisjoint(UNSHIFTED):
        return False
    if not names.isdisjoint(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
        return True
    if names.isdisjoint(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.values()):
        return False
    # BLIP-2's language model may be a T5, which has its labels shifted into the decoder's inputs.
    return not any(one.is_encoder_decoder for one in (base.config, base.config.get_text_config()))


def loss_terms(base: Any, batch: Mapping[str, Any], shifts: bool) -> float | None:
    """The number of terms that the model's own loss averages over; None where it may be the samples.

    The terms are the labels that are not -100. In semantic segmentation they are the pixels that the
    configuration does not ignore, with CTC the samples, and in question answering the answers inside of the
    input. There the loss is a mean of two means, over starts and over ends; where one answer's start is
    inside and its end is not, the number is the mean of both counts, and not exact.

    Args:
        base: a transformers model.
        batch: the arguments of its forward.
        shifts: whether its loss compares position i with label i + 1.
    """
    labels = batch.get("shift_labels", batch.get("labels"))
    if labels is None:
        return _answers(batch)
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return None
    if _is_ctc(base):
        return float(len(labels))
    pixel = _ignored_pixel(base) if labels.ndim == 3 else None
    if pixel is not None:
        every = base.config.num_labels == 1  # Segformer ignores pixels, but divides by all of them
        return float(labels.numel() if every else (labels != pixel).sum())
    if shifts and "shift_labels" not in batch:
        labels = labels[..., 1:]
    return float((labels != IGNORED).sum())


def loss_mean(base: Any, loss: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """The loss, divided by the samples if it is their sum, as CTC's is with `ctc_loss_reduction="sum"`."""
    summed = _is_ctc(base) and base.config.ctc_loss_reduction == "sum"
    return loss / len(batch["labels"]) if summed else loss


def _answers(batch: Mapping[str, Any]) -> float | None:
    answers = [batch.get("start_positions"), batch.get("end_positions")]
    inputs = batch.get("input_ids", batch.get("inputs_embeds"))
    if inputs is None or any(one is None for one in answers):
        return None
    return sum(float((one < inputs.shape[1]).sum()) for one in answers) / 2


def _ignored_pixel(base: Any) -> int | None:
    """The label of pixels that the loss ignores, in semantic segmentation."""
    config = getattr(base, "config", None)
    index: int | None = getattr(config, "semantic_loss_ignore_index", None)
    return getattr(config, "loss_ignore_index", None) if index is None else index  # UperNet's is the latter


def _is_ctc(base: Any) -> bool:
    kind: Any = type(base)
    return _has_ctc_loss(kind)


@cache
def _has_ctc_loss(kind: type) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CTC_MAPPING_NAMES

    return any(cls.__name__ in MODEL_FOR_CTC_MAPPING_NAMES.values() for cls in kind.__mro__)
