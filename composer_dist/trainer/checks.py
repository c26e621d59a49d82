"""What the Trainer refuses, or warns of, before it starts."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

from torch import nn

from composer_dist import wording
from composer_dist.composer_model import ComposerModel
from composer_dist.distributed.prepared import named_parameters_canonical
from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.precision import Precision
from composer_dist.trainer.clock import Time, TimeUnit
from composer_dist.trainer.scaling import LossScaling
from composer_dist.trainer.state import State

T = TypeVar("T")


def listed(name: str, given: T | Sequence[T] | None, kind: type[T]) -> list[T]:
    """One or several objects of a kind as a list.

    Raises:
        ParallelismTypeError: something else is among them.
    """
    items: list[Any] = list(given) if isinstance(given, Sequence) else [given]
    items = [] if given is None else items
    if wrong := {type(item).__name__ for item in items if not isinstance(item, kind)}:
        raise ParallelismTypeError(
            f"{name} takes a {kind.__name__} or a sequence of them, not {', '.join(sorted(wrong))}."
        )
    return items


def positive(name: str, time: Time | str | int | None) -> Time | None:
    """The Time that was given, if one was.

    Raises:
        ParallelismValueError: it is not positive, or not a time.
    """
    if time is None:
        return None
    time = Time.of(time)
    if not time.value > 0:
        raise ParallelismValueError(f"{name} must be positive, not '{time}'.")
    return time


def check_model(model: object) -> None:
    """Refuses what is no `ComposerModel`."""
    if not isinstance(model, ComposerModel):
        raise ParallelismTypeError(
            f"The Trainer needs a ComposerModel, not {type(model).__name__}: wrap a classifier in "
            "ComposerClassifier, a transformers or peft model in HuggingFaceModel, or subclass "
            "ComposerModel and give it forward and loss."
        )


def check_microbatch_size(size: object) -> None:
    """Refuses microbatch sizes that are no positive integers."""
    if size not in (None, "auto") and (not isinstance(size, int) or size < 1):
        raise ParallelismValueError(
            f"device_train_microbatch_size is a positive number of samples, 'auto' or None, not {size!r}."
        )


def check_accumulate(how: object) -> None:
    """Refuses ways to accumulate that do not exist."""
    if how not in ("sharded", "unsharded"):
        raise ParallelismValueError(f"accumulate is 'sharded' or 'unsharded', not {how!r}.")


def check_precision(precision: Precision | None, prepares: bool, scaling: object) -> None:
    """Refuses float8 that nothing would convert to, and a loss scaler without float16."""
    if precision is Precision.AMP_FP8 and not prepares:
        raise ParallelismValueError(
            "precision='amp_fp8' converts the model's linear layers during preparation; pass a "
            "parallelism_config, such as 'fsdp', which works in one process too."
        )
    if scaling is not None and precision is not Precision.AMP_FP16:
        raise ParallelismValueError("loss_scaling has an effect with precision='amp_fp16' only.")
    if scaling is not None and not isinstance(scaling, LossScaling):
        raise ParallelismTypeError(f"loss_scaling takes a LossScaling, not {type(scaling).__name__}.")


def check_compile(options: object, prepares: bool) -> None:
    """Refuses to compile what the preparation compiles, or may not be compiled whole."""
    if options and prepares:
        raise ParallelismValueError(
            "compile belongs into the parallelism_config here: ParallelismConfig(compile=...) compiles the "
            "blocks between the collectives."
        )
    if not isinstance(options, bool | Mapping):
        raise ParallelismTypeError(f"compile is True or torch.compile's options, not {options!r}.")


def check_no_meta(model: nn.Module) -> None:
    """Refuses a model that nothing will give its weights."""
    tensors = chain(model.named_parameters(), model.named_buffers())
    if on_meta := [name for name, tensor in tensors if tensor.is_meta]:
        raise ParallelismValueError(
            f"{_spell(on_meta)} on the meta device, without values. Pass a parallelism_config, "
            "which initializes the model, or build it on a real device."
        )


def check_trainable(state: State) -> None:
    """Refuses to train without optimizers; warns of trainable parameters that none of them has."""
    if not state.optimizers:
        raise ParallelismValueError("Training needs optimizers; pass them to the Trainer.")
    held = {
        id(parameter)
        for optimizer in state.optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    idle = [
        name
        for name, parameter in named_parameters_canonical(state.model)
        if parameter.requires_grad and id(parameter) not in held
    ]
    if idle:
        warnings.warn(
            f"{_spell(idle)} trainable but in no optimizer: gradients will be computed for "
            "nothing. Give them to an optimizer (built after adapters are added), or freeze them.",
            UserWarning,
            stacklevel=4,
        )


def check_schedule(state: State, every_batch: bool | None, epoch_length: int | None) -> None:
    """Warns where schedulers would never move, and nobody said whether they step by epochs."""
    end = state.max_duration
    if not state.schedulers or every_batch is not None or end is None:
        return
    one_epoch = (end.unit is TimeUnit.EPOCH and end.value <= 1) or (
        end.unit is TimeUnit.BATCH and epoch_length is not None and end.value <= epoch_length
    )
    if one_epoch:
        warnings.warn(
            f"Schedulers step after each epoch, and training ends at '{end}', within the first: "
            "the learning rate will not move. Pass step_schedulers_every_batch=True, or False if "
            "that is what you want.",
            UserWarning,
            stacklevel=4,
        )


def _spell(names: Sequence[str]) -> str:
    return f"{wording.listed(names, 5)} {'is' if len(names) == 1 else 'are'}"
