"""Which parameters each phase trains: names and patterns, looked up in a model of any kind.

Names are the clean ones, without the segments of wrappers, so that a schedule fits the model before
and after its preparation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from composer_dist.distributed.prepared import named_parameters_canonical
from composer_dist.errors import ParallelismValueError
from composer_dist.trainer.finetuning.schedule import REST, Phase
from composer_dist.wording import listed, near_miss


@dataclass(frozen=True)
class Fault:
    """Why a schedule does not fit a model."""

    phase: int
    text: str
    entry: int | None = None
    """Which of the phase's `params`; None for the phase as a whole."""

    def __str__(self) -> str:
        return self.text if self.entry is None else f"phase {self.phase}: {self.text}"


def plan_phases(phases: Sequence[Phase], model: nn.Module) -> list[list[str]]:
    """The names of the parameters that each phase adds, in the model's order.

    Phases choose among the parameters that are trainable now: what an adapter or the user has frozen
    stays frozen. A tied parameter may be called by any of its names; here it comes by its first.

    Raises:
        ParallelismValueError: all faults at once, see `fit`.
    """
    parts, faults = fit(phases, model)
    if faults:
        raise ParallelismValueError("The phases do not fit the model:\n" + "\n".join(map(str, faults)))
    return parts


def fit(phases: Sequence[Phase], model: nn.Module) -> tuple[list[list[str]], list[Fault]]:
    """What `plan_phases` returns, and what is wrong with it.

    That is: a name or pattern that matches nothing, or only frozen parameters; a parameter in several
    phases; several phases with "rest", or nothing left for it.
    """
    names = _Names(model)
    chosen: list[set[str]] = []
    faults: list[Fault] = []
    for number, phase in enumerate(phases):
        chosen.append(set())
        for index, entry in enumerate(phase.params):
            if entry == REST:
                continue
            try:
                chosen[-1] |= names.select(entry)
            except ParallelismValueError as error:
                faults.append(Fault(number, str(error), index))
    faults += _overlaps(chosen)
    rests = [
        (number, list(phase.params).index(REST))
        for number, phase in enumerate(phases)
        if REST in phase.params
    ]
    if len(rests) > 1:
        listing = ", ".join(str(number) for number, _ in rests)
        faults.append(Fault(rests[-1][0], f"'rest' stands in phases {listing}; it may stand in one."))
    elif rests and not faults:
        (number, index), rest = rests[0], names.trainable.difference(*chosen)
        if not rest:
            frozen = f", and {names.frozen} are frozen" if names.frozen else ""
            faults.append(
                Fault(number, f"nothing is left for 'rest': phases name all others{frozen}.", index)
            )
        chosen[number] |= rest
    return [[name for name in names.first if name in part] for part in chosen], faults


def select_parameters(model: nn.Module, entries: Sequence[str]) -> set[str]:
    """The first names of the trainable parameters that names or patterns choose.

    Raises:
        ParallelismValueError: one matches nothing.
    """
    names = _Names(model)
    return set().union(*(names.select(entry) for entry in entries))


class _Names:
    """The parameters of a model, by all names of theirs and of the modules that hold them."""

    def __init__(self, model: nn.Module) -> None:
        self.first: dict[str, nn.Parameter] = {}
        """First name to parameter, in the model's order."""
        by_id: dict[int, str] = {}
        self._owners: dict[str, set[str]] = {}
        """Any name of a parameter or of a module to the first names of the parameters it means."""
        for name, parameter in named_parameters_canonical(model, remove_duplicate=False):
            first = by_id.setdefault(id(parameter), name)
            self.first.setdefault(first, parameter)
            parts = name.split(".")
            for end in range(1, len(parts) + 1):
                self._owners.setdefault(".".join(parts[:end]), set()).add(first)
        self.trainable = {name for name, parameter in self.first.items() if parameter.requires_grad}
        self.frozen = len(self.first) - len(self.trainable)

    def select(self, entry: str) -> set[str]:
        """The trainable parameters that one name or pattern means."""
        if entry.startswith("re:"):
            try:
                pattern = re.compile(entry.removeprefix("re:"))
            except re.error as error:
                raise ParallelismValueError(f"{entry!r} is no regular expression: {error}.") from None
            found = {
                first for name in self._owners if pattern.fullmatch(name) for first in self._owners[name]
            }
        else:
            found = self._owners.get(entry, set())
        if not found:
            raise ParallelismValueError(
                f"{entry!r} matches no parameter, and no module that has any.{near_miss(entry, self._owners)}"
            )
        if not found & self.trainable:
            raise ParallelismValueError(
                f"{entry!r} matches only frozen parameters ({listed(sorted(found))}). Leave freezing to the "
                "phases: build the Trainer while requires_grad is True."
            )
        return found & self.trainable


def _overlaps(chosen: Sequence[set[str]]) -> Iterator[Fault]:
    for later, mine in enumerate(chosen):
        for earlier in range(later):
            if both := sorted(mine & chosen[earlier]):
                yield Fault(
                    later,
                    f"phases {earlier} and {later} both name {listed(both)}. Phases add to each other: name "
                    "a parameter in the first one that trains it, and 'rest' for everything else.",
                )
