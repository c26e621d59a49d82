"""Which modules' activations are recomputed or offloaded, and by whose word."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from composer_dist.distributed.activation_checkpointing import (
    Mode,
    ac_from_flags,
    ac_mode,
    checkpoint_modules,
    checkpointed_modules,
)
from composer_dist.distributed.config import ParallelismConfig
from composer_dist.errors import ParallelismValueError


@dataclass(frozen=True)
class Checkpointed:
    """One module whose activations are not kept on the device."""

    module: str
    mode: Mode
    reason: str
    options: Mapping[str, Any] = field(default_factory=dict)


def plan_checkpointing(
    modules: Mapping[str, nn.Module],
    config: ParallelismConfig,
    check_fn: Callable[[nn.Module], bool] | None,
    rules: Mapping[str, Mapping[str, tuple[Any, str]]],
    blocks: Sequence[str],
) -> tuple[Checkpointed, ...]:
    """Choose the modules: by rule, else by `check_fn` or attributes, else the model's blocks.

    Args:
        modules: the model's, by name.
        config: which activations to keep.
        check_fn: the caller's word on each module.
        rules: their fields by module name.
        blocks: the innermost units, taken where nobody has chosen.

    Raises:
        ParallelismValueError: `check_fn` where nothing is to be checkpointed, a mode that does not
            exist, or checkpointing that finds no module.
    """
    by_rule = {name: fields["act_ckpt"] for name, fields in rules.items() if "act_ckpt" in fields}
    chosen = {name: Checkpointed(name, *found) for name, found in _by_rule(by_rule, config.strict)}
    fsdp2 = config.fsdp2
    wanted = config.activation_checkpointing
    if wanted is None and fsdp2 is not None:
        wanted = ac_from_flags(fsdp2.activation_checkpointing, fsdp2.activation_cpu_offload)
    mode = ac_mode(wanted, strict=config.strict)
    if mode is None:
        if check_fn is not None:
            raise ParallelismValueError(
                "activation_checkpointing_check_fn has no effect: activation checkpointing or offloading "
                "must be enabled for it. Set activation_checkpointing, or leave the function out."
            )
        return tuple(chosen.values())
    names = checkpointed_modules(modules[""], check_fn)
    reason = "activation_checkpointing_check_fn" if check_fn else "an attribute of the model asks for it"
    if not names and check_fn is None:
        names, reason = list(blocks), "it is a block"
    if not names:
        message = (
            "activation_checkpointing is on, but "
            + (
                "activation_checkpointing_check_fn chooses"
                if check_fn
                else "the model has no repeated block: choose"
            )
            + " no module. Mark modules with _activation_checkpointing, or pass a check function."
        )
        if config.strict:
            raise ParallelismValueError(message)
        warnings.warn(message, UserWarning, stacklevel=2)
    for name in names:
        if name not in by_rule:
            chosen[name] = Checkpointed(name, mode[0], reason, mode[1])
    return tuple(chosen.values())


def apply_checkpointing(model: nn.Module, chosen: Sequence[Checkpointed]) -> None:
    """Checkpoint the chosen modules, in place; before anything is sharded."""
    kinds = {(one.mode, repr(one.options)): one for one in chosen}
    for kind, one in kinds.items():
        names = [other.module for other in chosen if (other.mode, repr(other.options)) == kind]
        checkpoint_modules(model, names, one.mode, one.options)


def _by_rule(
    rules: Mapping[str, tuple[Any, str]], strict: bool
) -> Iterator[tuple[str, tuple[Mode, str, dict[str, Any]]]]:
    for name, (value, source) in rules.items():
        mode = ac_mode(value, strict=strict)
        if mode is not None:
            yield name, (mode[0], source, mode[1])
