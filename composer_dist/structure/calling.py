"""How a model of any kind is called with a batch, and what its loss is."""

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer_dist.composer_model import ComposerModel
from composer_dist.errors import ParallelismValueError
from composer_dist.structure.families import class_name, transformers_models
from composer_dist.tensors.nested import tensors_in

Loss = Callable[[Any, Any], Any]
"""Takes the outputs and the batch."""


def example_batch(model: nn.Module, batch: Any) -> Any:
    """The batch itself; tokens and labels if it is two numbers, (sequences, tokens).

    Raises:
        ParallelismValueError: it is numbers, but not two, or `model` is not a transformers model.
    """
    if not (isinstance(batch, tuple) and batch and all(isinstance(one, int) for one in batch)):
        return batch
    models = transformers_models(model)
    if not models or len(batch) != 2:
        raise ParallelismValueError(
            f"batch={batch} is a number of sequences and of tokens for a transformers model. Give "
            f"{class_name(model)} example inputs: a tensor, a tuple, or a mapping of them, on any device."
        )
    vocabulary = models[0].config.get_text_config().vocab_size
    tokens = (torch.arange(batch[0] * batch[1]).view(batch) * 7919 + 13) % vocabulary  # all sorts of them
    return {"input_ids": tokens, "labels": _labels(models[0], tokens)}


def _labels(model: Any, tokens: Tensor) -> Tensor:
    """One for each sequence if the model classifies sequences, else one for each token."""
    name, classes = type(model).__name__, model.config.num_labels
    if name.endswith("ForSequenceClassification"):
        return tokens[:, 0] % classes if classes > 1 else tokens[:, 0].float()  # a number is regressed
    return tokens % classes if name.endswith("ForTokenClassification") else tokens.clone()


def call(model: nn.Module, batch: Any) -> Any:
    """The outputs for a batch: forward's arguments as a tuple or mapping, or its only one."""
    if isinstance(model, ComposerModel):
        return model(batch)
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def loss_of(
    model: nn.Module, outputs: Any, batch: Any, loss: Loss | None, otherwise: Callable[[Tensor], Tensor]
) -> Tensor:
    """The loss as one number: that of `loss`, the model's own, or the sum of a function of each output.

    Args:
        otherwise: of an output with floats and dimensions, if neither `loss` nor the model gives a loss. A
            number is a loss itself.
    """
    if loss is not None:
        value = loss(outputs, batch)
    elif isinstance(model, ComposerModel):
        value = model.loss(outputs, batch)
    else:
        value = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
        if value is None:
            floats = (one for one in tensors_in(outputs) if one.is_floating_point())
            value = [otherwise(one.float()) if one.ndim else one.float() for one in floats]
    parts = [whole(one).sum() for one in tensors_in(value)]
    return reduce(torch.add, [one.to(parts[0].device) for one in parts])


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or all of a DTensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
