"""A step on a copy of a small model shows whether the data, the model and the optimizer match."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from composer_dist import ComposerModel, HuggingFaceModel
from composer_dist.distributed import meta_init, process_group
from composer_dist.distributed.prepared import mesh_of
from composer_dist.errors import ParallelismError, ParallelismValueError
from composer_dist.precision import Precision, autocast
from composer_dist.random_states import set_aside
from composer_dist.recipe.other_libraries.failures import blaming
from composer_dist.recipe.schema import ChatData
from composer_dist.structure.kept import evaluating

# Not public: only recipes and the Trainer split data and compute losses.
from composer_dist.trainer.data.sampling import data_part
from composer_dist.trainer.state import State
from composer_dist.trainer.step import total_loss
from composer_dist.wording import dtype_name

_LARGEST = 5_000_000
"""Parameters of a model that is tried; a step of a larger one takes long."""
_LOOKED_AT = 32
_UNTRIED = "Default process group has not been initialized", "meta tensor"
"""Texts of errors of models that need other ranks, or keep tensors on meta that are not buffers."""
_REMEDIES = {
    r"Target \d+ is out of bounds": "a label needs more classes than the model has; set num_labels in "
    "model.config, or the number of your module's outputs",
    "index out of range in self": "a token is not in the vocabulary; raise vocab_size in model.config",
    "equal to number of classes": "model.num_classes is not the number of the module's outputs",
}


def samples_to_try(train: Any, length: int | None) -> list[Any]:
    """Some samples of a data set, those with the largest labels and tokens among them."""
    if length is None:  # a stream
        return [*islice(train, 2)]
    count = min(length, _LOOKED_AT)
    found = [train[place * (length - 1) // max(count - 1, 1)] for place in range(count)]
    sizes = [*zip(*map(_largest, found), strict=False)]
    chosen = {0, count - 1, *(max(range(count), key=of.__getitem__) for of in sizes)}
    return [found[place] for place in sorted(chosen)]


def _largest(sample: Any) -> list[float]:
    """The largest whole number in each field."""
    fields: Any = sample.values() if isinstance(sample, Mapping) else sample
    found = []
    for field in fields if isinstance(sample, Mapping | list | tuple) else [sample]:
        whole = isinstance(field, Tensor) and field.numel() and not field.is_floating_point()
        found.append(float(field.max()) if whole else float(field) if isinstance(field, int) else 0.0)
    return found


def try_step(
    model: ComposerModel, kind: Any, arguments: Mapping[str, Any], precision: Precision | None, batch: Any
) -> None:
    """Takes a step with a copy of a model that is small enough, on a CPU; random numbers stay as they were.

    Args:
        model: stays as it is; values on the meta device are initialized in the copy.
        kind: the optimizer's class, and `arguments` its arguments.
        precision: the run's.
        batch: of a few samples.

    Raises:
        ParallelismValueError: the step fails.
    """
    size = sum(parameter.numel() for parameter in model.parameters())
    if size > _LARGEST or torch.accelerator.is_available() or precision is Precision.AMP_FP8:
        return
    with set_aside():
        try:
            model = deepcopy(model).train()
            meta_init(model)
        except Exception:  # what cannot be copied or initialized is reported where the run needs it
            return
        try:
            _step(model, kind, arguments, autocast(precision, torch.device("cpu")), batch)
        except ParallelismError as error:
            if not any(text in str(error) for text in _UNTRIED):
                raise


def _step(model: ComposerModel, kind: Any, arguments: Mapping[str, Any], cast: Any, batch: Any) -> None:
    with _named("forward"), cast:
        outputs = model(batch)
    with _named("loss"), cast:
        loss = total_loss(model.loss(outputs, batch))
    metrics = model.get_metrics(is_train=False) | model.get_metrics(is_train=True)
    with _named("metrics"), cast, evaluating(model):
        for metric in metrics.values():  # the training may have computed no logits
            model.update_metric(batch, model.eval_forward(batch), metric)
    with _named("backward"):
        loss.backward()
    if kind.__module__.startswith("torch.optim."):  # the user's own may need all ranks
        with _named("optimizer's step"):
            kind([one for one in model.parameters() if one.requires_grad], **arguments).step()


class PackingError(ParallelismValueError):
    """A model in which the documents of one sample would see each other."""


def check_packing(model: HuggingFaceModel, state: State, data: ChatData) -> None:
    """Refuses a model in which the documents of one sample see each other; every rank calls it.

    Such as one whose attention takes no `position_ids`, or whose layers have a state. Another first document
    changes the second one's logits; with positions of two documents it must change them much less.

    Args:
        model: prepared, with a tokenizer; it stays as it is.
        data: its `batch_size` counts, because some kernels separate documents in a batch of one only.

    Raises:
        PackingError: on every rank.
    """
    mesh, device, tokenizer = mesh_of(model), state.device, cast(Any, model.tokenizer)
    if mesh is not None and mesh.sizes.get("cp", 1) > 1:  # each rank's model gets a part of a sample there
        return
    rows = 1 if data.batch_size <= data_part(mesh)["num_replicas"] else 2
    half = max(min(_LOOKED_AT, data.context // 2), 1)
    tokens = tokenizer("Pack my box with five dozen jugs.", add_special_tokens=False)["input_ids"]
    second = torch.tensor(tokens * half)[:half]
    samples = [torch.cat([first, second]).to(device) for first in (second, second.flip(0))]
    changes = []
    with evaluating(model), autocast(state.precision, device):
        for documents in (1, 2):
            positions = torch.arange(2 * half // documents, device=device).repeat(documents).expand(rows, -1)
            batches = [{"input_ids": ids.expand(rows, -1), "position_ids": positions} for ids in samples]
            one, other = (model(batch)["logits"][0, half:].float() for batch in batches)
            changes.append((one - other).abs().max())
    if process_group.any_rank(bool(changes[1] > changes[0] / 5)):  # rounding may change some
        adapter = next(iter(getattr(model.model, "peft_config", {}).values()), None)
        raise PackingError(
            "data.packing: rows that are packed into one sample would see each other, because a model of "
            f"type {model.config.model_type}{f' with {adapter.peft_type}' if adapter else ''} does not "
            "separate them by their position_ids. Set data.packing: false."
        )


@contextmanager
def _named(stage: str) -> Iterator[None]:
    try:
        with blaming(f"a step on some samples of the data fails in the {stage}"):
            yield
    except ParallelismError as error:
        for pattern, remedy in _REMEDIES.items():
            if re.search(pattern, str(error)):
                raise ParallelismValueError(f"{str(error).removesuffix('.')}: {remedy}.") from error
        raise


def check_eps(optimizer: Optimizer) -> Optimizer:
    """The optimizer, unless its eps is 0 in the dtype of a parameter.

    Raises:
        ParallelismValueError: a step would divide by zero where a gradient is.
    """
    for group in optimizer.param_groups:
        for dtype in {parameter.dtype for parameter in group["params"] if parameter.requires_grad}:
            eps = group.get("eps")
            if isinstance(eps, float) and eps and not torch.tensor(eps, dtype=dtype):
                raise ParallelismValueError(
                    f"The weights that train are {dtype_name(dtype)}, in which optimizer.eps={eps} is 0, and "
                    "steps would divide by it. Set model.dtype: float32, and trainer.precision for less."
                )
    return optimizer
