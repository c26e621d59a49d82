"""The settings of a run, which its checkpoints record: on resuming, a table shows those that differ.

They are what the Trainer was given, before anything has trained or been loaded, as text.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from composer_dist.distributed.account import Preparation
from composer_dist.distributed.plan.text import mesh_in_words
from composer_dist.distributed.prepared import mesh_of
from composer_dist.errors import CheckpointValueError
from composer_dist.trainer.finetuning.rates import rebase
from composer_dist.trainer.state import State

_log = logging.getLogger("composer_dist")

Settings = dict[str, str]
Source = Literal["checkpoint", "config"]
_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
_STATE_OF = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg", "momentum": "momentum_buffer"}
"""What optimizers of torch keep for each parameter, from zeros, if an option is set."""
_PLAIN = (bool, int, float, str, list, tuple, Counter)


def settings_of(state: State, preparation: Preparation | None, others: Mapping[str, object]) -> Settings:
    """The settings of a Trainer.

    Args:
        state: with the prepared model.
        preparation: of that model, if the Trainer prepared it.
        others: settings by name.
    """
    mesh = mesh_of(state.model)
    features = preparation.plan.features if preparation else ()
    words = [*features, mesh_in_words(mesh.sizes) if mesh else ""]
    found: dict[str, object] = {"parallelism": ", ".join(filter(None, words)) or "none"}
    for index, optimizer in enumerate(state.optimizers):
        name = f"optimizer{index or ''}"
        found[name] = type(optimizer).__name__
        for option in optimizer.defaults.keys() - _IMPLEMENTATION:
            values = [str(_option(group, option)) for group in optimizer.param_groups]
            found[f"{name}.{option}"] = values[0] if len(set(values)) == 1 else ", ".join(values)
    for index, scheduler in enumerate(state.schedulers):
        name = f"scheduler{index or ''}"
        found[name] = type(scheduler).__name__
        for option, value in scheduler.state_dict().items():
            if isinstance(value, _PLAIN) and option[0] != "_" and option not in ("base_lrs", "last_epoch"):
                found[f"{name}.{option}"] = value
    return {name: str(value) for name, value in {**found, **others}.items()}


def _option(group: Mapping[str, Any], option: str) -> Any:
    """An option of a group; of the learning rate what schedules start from."""
    value = group.get("initial_lr", group["lr"]) if option == "lr" else group.get(option)
    return value.item() if isinstance(value, Tensor) else value


def compare(
    path: str, saved: Mapping[str, str], state: State, source: Source, ignored: Callable[[str], bool]
) -> list[int]:
    """Shows on rank 0 what differs from the checkpoint, and keeps in `state.settings` what counts.

    Args:
        path: the checkpoint.
        saved: its settings.
        source: whose options of the optimizers count.
        ignored: whether a part of the checkpoint is not loaded.

    Returns:
        The numbers of the optimizers that start afresh.

    Raises:
        CheckpointValueError: an optimizer or a scheduler is of another class, whose state it cannot take.
    """
    now, fresh, rows = state.settings, [], []
    counting = dict(now)
    for name in sorted({*saved, *now}, key=[*now, *saved].index):
        then, mine = saved.get(name, "none"), now.get(name, "none")
        if then == mine:
            continue
        owner, _, option = name.partition(".")
        kind = owner.rstrip("0123456789")
        counts: Source = "config"
        if kind in ("optimizer", "scheduler") and not ignored("schedulers" if kind == "scheduler" else owner):
            if not option and owner in saved and owner in now:
                if kind == "scheduler" or source == "checkpoint":
                    raise _other_class(path, kind, then, mine)
                fresh.append(int(owner.removeprefix(kind) or 0))
            elif kind == "scheduler" or source == "checkpoint":
                counts, counting[name] = "checkpoint", then
        rows.append((name, then, mine, counts))
    if rows and state.rank == 0:
        _log.warning("%s", _table(path, rows, fresh))
    state.settings = counting
    return fresh


def _other_class(path: str, kind: str, then: str, mine: str) -> CheckpointValueError:
    remedy = (
        f"resume with optimizer='config' (in YAML resume: {{optimizer: config}}), which starts {mine} afresh"
        if kind == "optimizer"
        else "load_ignore_keys=['schedulers'], which starts it afresh"
    )
    return CheckpointValueError(
        f"The {kind} of {path} is {then}, and this run's is {mine}, which cannot use its state. Restore "
        f"{then}, or {remedy}."
    )


def _table(path: str, rows: Sequence[tuple[str, ...]], fresh: Sequence[int]) -> str:
    """What differs, in columns."""
    lines = [("setting", "checkpoint", "config", "used"), *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    text = [f"These settings differ from {path}:"]
    for *cells, counts in lines:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        text.append(f"  {'  '.join(padded)}  {counts}")
    if any(name.startswith("optimizer") and counts == "checkpoint" for name, *_, counts in rows):
        remedy = "resume with optimizer='config' (in YAML resume: {optimizer: config})"
        text.append(f"  For the optimizer's new options, {remedy}.")
    if fresh:
        text.append("  An optimizer of another class starts without state.")
    return "\n".join(text)


class Options:
    """The options of an optimizer's groups, to be set again after a checkpoint has been loaded."""

    def __init__(self, optimizer: Optimizer) -> None:
        names = optimizer.defaults.keys() - _IMPLEMENTATION
        self._optimizer = optimizer
        self._groups = [{n: _option(group, n) for n in names} for group in optimizer.param_groups]

    def restore(self, schedulers: Sequence[LRScheduler], fresh: bool) -> None:
        """Sets them. Schedules continue from where they are, in proportion to the learning rate.

        Args:
            schedulers: have their states.
            fresh: whether the optimizer's groups have not been loaded.
        """
        groups = self._optimizer.param_groups
        for scheduler in schedulers if fresh else ():
            if scheduler.optimizer is self._optimizer:
                bases = getattr(scheduler, "base_lrs", ())
                for group, rate, base in zip(groups, scheduler.get_last_lr(), bases, strict=False):
                    group.update(lr=rate, initial_lr=base)
        for index, options in enumerate(self._groups):
            groups[index].update({name: value for name, value in options.items() if name != "lr"})
            rebase(schedulers, self._optimizer, index, options["lr"])
        for group in groups if type(self._optimizer).__module__.startswith("torch.optim") else ():
            new = [name for option, name in _STATE_OF.items() if group.get(option)]
            for state in filter(None, map(self._optimizer.state.get, group["params"])):
                like = next((one for name, one in state.items() if name != "step"), None)
                if isinstance(like, Tensor):
                    state.update({name: torch.zeros_like(like) for name in new if name not in state})
