"""A run's phases: what is wrong with them has its line, also where only the model shows it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from composer_dist.recipe.problems import Faults
from composer_dist.recipe.source import Path, Problem
from composer_dist.trainer.finetuning.schedule import NoImprovement, Phase, default_phases, phases_of
from composer_dist.trainer.finetuning.selection import Fault, fit, select_parameters

_SECTION: Path = ("phases", "schedule")


def check_schedule(schedule: Any, faults: Faults) -> None:
    """Finds what is wrong with a schedule, as far as that needs no model."""
    known = len(faults.problems)
    written: Iterable[Any] = enumerate(schedule) if isinstance(schedule, list) else ()
    if isinstance(schedule, Mapping):
        written = ((str(key), phase) for key, phase in schedule.items())
    for key, phase in written:
        if isinstance(phase, Mapping):
            place, rest = (*_SECTION, key), dict(phase)
            if isinstance(rest.get("until"), Mapping):
                faults.check(NoImprovement, rest.pop("until"), (*place, "until"))
            faults.check(Phase, rest, place)
    if schedule is not None and len(faults.problems) == known:
        with faults.at(*_SECTION):
            phases_of(schedule)


def check_phases(
    section: Mapping[str, Any], model: nn.Module, faults: Faults
) -> list[tuple[Phase, list[str]]]:
    """The phases with the names of the parameters that each adds; finds what does not fit the model.

    Args:
        section: the configuration's `phases`, which are sound by themselves.
        model: prepared or not, also on the meta device.
        faults: where to put it.
    """
    schedule = section.get("schedule")
    phases = default_phases(model) if schedule is None else phases_of(schedule)
    parts, wrong = fit(phases, model)
    for fault in wrong:
        text = f"{schedule}: {fault}" if isinstance(schedule, str) else fault.text
        faults.problems.append(Problem(_place(schedule, fault), text))
    no_decay = section.get("no_decay", ())
    for entry in (no_decay,) if isinstance(no_decay, str) else no_decay:
        with faults.at("phases", "no_decay"):
            select_parameters(model, [entry])
    return list(zip(phases, parts, strict=True))


def _place(schedule: Any, fault: Fault) -> Path:
    """Where in the configuration; of a schedule in a file of its own, where that is named."""
    if isinstance(schedule, str):
        return _SECTION
    entry = () if fault.entry is None else (fault.entry,)
    listed = isinstance(schedule[fault.phase]["params"], list)
    phase = fault.phase if isinstance(schedule, list) else str(fault.phase)
    return (*_SECTION, phase, "params", *(entry if listed else ()))
