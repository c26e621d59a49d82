"""Checks whether a module comes from transformers, peft or torchmetrics; no other file does.

A library that has not been imported has no modules in the model, so `is_a` looks it up in
`sys.modules` and never imports it.
"""

import logging
import re
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from composer_dist import _torch
from composer_dist.structure.names import ancestors
from composer_dist.structure.structure import Structure

_HOMES = {
    "PreTrainedModel": "transformers.modeling_utils",
    "GradientCheckpointingLayer": "transformers.modeling_layers",
    "Conv1D": "transformers.pytorch_utils",
    "PeftModel": "peft",
    "BaseTuner": "peft.tuners.tuners_utils",
    "BaseTunerLayer": "peft.tuners.tuners_utils",
    "AdaLoraModel": "peft.tuners.adalora",
    "AuxiliaryTrainingWrapper": "peft.utils.other",
    "ModulesToSaveWrapper": "peft.utils.other",
    "Metric": "torchmetrics",
    "MetricCollection": "torchmetrics",
}
"""Class name to the module that has it."""
_POSITIONS = re.compile(r"^wpe$|(?<!relative_)position")
"""In the names of tables of positions; relative ones have no end."""


def quiet_imports() -> AbstractContextManager[None]:
    """Inside, libraries that are imported do not log that torchao has kernels for other machines.

    transformers and peft import torchao 0.18 if it is installed; under torch 2.13 that logs four such lines.
    """
    return errors_only("torchao", "torch.utils._pytree")


@contextmanager
def errors_only(*names: str) -> Iterator[None]:
    """Inside, these loggers log no warnings."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def is_a(module: object, *kinds: str) -> bool:
    """Whether `module` is an instance of one of these classes of other libraries (the keys of `_HOMES`)."""
    of = _is_of.__wrapped__ if torch.compiler.is_compiling() else _is_of  # Dynamo warns of caches
    return of(type(module), kinds)  # type: ignore[arg-type]


@cache
def _is_of(cls: type, kinds: tuple[str, ...]) -> bool:
    classes = (getattr(sys.modules.get(_HOMES[kind]), kind, None) for kind in kinds)
    return issubclass(cls, tuple(filter(None, classes)))


def transformers_models(model: nn.Module) -> list[Any]:
    """The transformers models in `model`, possibly itself: the outermost of each configuration."""
    found: dict[int, Any] = {}
    for module in model.modules():
        if is_a(module, "PreTrainedModel"):
            found.setdefault(id(module.config), module)
    return list(found.values())


def transformers_owners(modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    """The innermost transformers model that is or contains each module, else None; parents come first."""
    found: dict[str, Any] = {}
    for name, module in modules.items():
        is_one = is_a(module, "PreTrainedModel")
        found[name] = module if is_one else found.get(name.rpartition(".")[0])
    return found


def architecture_of(structure: Structure, name: str) -> str | None:
    """The class of the innermost transformers model that contains all places of the module called `name`."""
    module = structure.modules[name]
    names = [other for other, known in structure.modules.items() if known is module]
    for above in ancestors(name):
        inside = all(above in ancestors(other) for other in names) and above not in names
        if inside and is_a(structure.modules[above], "PreTrainedModel"):
            return type(structure.modules[above]).__name__
    return None


def position_tables(model: nn.Module) -> dict[str, int]:
    """How many positions each table of absolute positions of a transformers model has, by module name."""
    found = {}
    for name, table in model.named_modules():
        if isinstance(table, nn.Embedding) and _POSITIONS.search(name.rpartition(".")[2]):
            padding = table.padding_idx
            reserved = getattr(table, "offset", 0) if padding is None else padding + 1
            found[name] = table.num_embeddings - reserved
    return found


def class_name(module: nn.Module) -> str:
    """The name of a module's class as the user wrote it."""
    kind = type(module)
    return (_torch.original_class(kind) if isinstance(module, FSDPModule) else kind).__name__


@contextmanager
def original_classes(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, modules have their original classes instead of FSDP2's or DDP's subclasses.

    transformers, peft and initializers read class names; the first two write them into configurations.
    """
    prepared: list[tuple[nn.Module, type[nn.Module]]] = [
        (module, type(module))
        for module in modules
        if isinstance(module, FSDPModule) or _torch.is_replicated(module)
    ]
    for module, cls in prepared:
        module.__class__ = _torch.original_class(cls)
    try:
        yield
    finally:
        for module, cls in prepared:
            module.__class__ = cls


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, transformers shows no progress bars: preparation and exports show their own."""
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging  # it has no types
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def values_unknown() -> Iterator[None]:
    """Inside, transformers treats tensors without values as ordinary ones, and makes no masks for them.

    Other threads see nothing of it; one that enters too waits.
    """
    utils: Any = sys.modules.get("transformers.utils.import_utils")
    if utils is None:
        yield
        return
    with _one_thread:
        before, here = utils.is_fake_tensor, threading.get_ident()
        utils.is_fake_tensor = lambda tensor: threading.get_ident() != here and before(tensor)
        try:
            yield
        finally:
            utils.is_fake_tensor = before


_one_thread = threading.RLock()


def vocabulary_of(model: nn.Module) -> int | None:
    """The size of a transformers model's vocabulary; None if it is not known, or for another model."""
    for found in transformers_models(model):
        if size := getattr(found.config.get_text_config(), "vocab_size", None):
            return int(size)
    return None
