"""What a run must remember beside its model, its optimizers and its place in the data."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from composer_dist.errors import CheckpointValueError, ParallelismValueError
from composer_dist.trainer.callbacks import Callback
from composer_dist.trainer.state import State


def run_state(state: State, callbacks: Sequence[Callback]) -> dict[str, Any]:
    """The clock, the schedulers and the callbacks, by name."""
    states = {name: callback.state_dict() for name, callback in _numbered(callbacks).items()}
    return {
        "state": state.state_dict(),
        "loss_scaler": state.loss_scaler.state_dict() if state.loss_scaler else None,
        "schedulers": [scheduler.state_dict() for scheduler in state.schedulers],
        "callbacks": {name: one for name, one in states.items() if one},
    }


def load_run_state(state: State, callbacks: Sequence[Callback], saved: Mapping[str, Any]) -> None:
    """Takes over what `run_state` gave; a callback that was not there then stays as it is.

    To be called before the optimizers' states are loaded: callbacks that change the optimizers' groups
    make them here as they were.

    Raises:
        CheckpointValueError: it has another number of schedulers.
        ParallelismValueError: it is of something else.
    """
    parts = {"state", "loss_scaler", "schedulers", "callbacks"}
    if wrong := parts.symmetric_difference(saved):
        raise ParallelismValueError(
            f"This is no Trainer's state: missing or unknown are {', '.join(sorted(wrong))}."
        )
    if len(saved["schedulers"]) != len(state.schedulers):
        raise CheckpointValueError(
            f"The run was begun with {len(saved['schedulers'])} of torch's schedulers, and the Trainer has "
            f"{len(state.schedulers)}: give it the same ones."
        )
    named = _numbered(callbacks)
    if gone := [name for name in saved["callbacks"] if name not in named]:
        warnings.warn(
            f"What the callbacks {', '.join(gone)} remembered is not used: the Trainer has no such callback.",
            UserWarning,
            stacklevel=3,
        )
    state.load_state_dict(saved["state"])
    for name, callback in named.items():
        if name in saved["callbacks"]:
            callback.load_state_dict(saved["callbacks"][name])
    if state.loss_scaler and saved["loss_scaler"]:
        state.loss_scaler.load_state_dict(saved["loss_scaler"])
    for scheduler, one in zip(state.schedulers, saved["schedulers"], strict=True):
        scheduler.load_state_dict(one)  # after the callbacks, which may add groups to the optimizers


def _numbered(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """The callbacks by class and number: `EarlyStopping/0`."""
    named: dict[str, Callback] = {}
    counts: dict[str, int] = {}
    for callback in callbacks:
        kind = type(callback).__name__
        named[f"{kind}/{counts.get(kind, 0)}"] = callback
        counts[kind] = counts.get(kind, 0) + 1
    return named
